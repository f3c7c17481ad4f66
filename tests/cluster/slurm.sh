#!/usr/bin/env bash
# A real Slurm of several machines on this one: `slurm.sh start FOLDER [MACHINES]`, `slurm.sh lose FOLDER MACHINE`,
# `slurm.sh bring FOLDER MACHINE`, `slurm.sh stop FOLDER`. As root, with slurmctld, slurmd, slurm-client and munge installed.
# Everything is in the folder, also the configuration and munge's key and socket: a Slurm that this machine belongs to is not
# touched. Commands reach this one with SLURM_CONF=FOLDER/slurm.conf.
set -eu
usage() { echo "usage: $0 start FOLDER [MACHINES] | lose FOLDER MACHINE | bring FOLDER MACHINE | stop FOLDER" >&2; exit 2; }
[ $# -ge 2 ] || usage
home=$(realpath -m "$2")
export SLURM_CONF="$home/slurm.conf"
port=${SLURM_TEST_PORT:-16817}  # and as many above it as there are machines

configure() { # machines
  # Times are short, because the tests wait for them: until a silent machine counts as lost (SlurmdTimeout), between signal and
  # kill (KillWait), and until a requeued job may start again (cred_expire).
  cat >"$home/slurm.conf" <<C
ClusterName=one-host
SlurmctldHost=localhost
SlurmctldPort=$port
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$home/munge/socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation=$home/state
SlurmdSpoolDir=$home/%n
SlurmdPidFile=$home/%n.pid
SlurmctldPidFile=$home/slurmctld.pid
SlurmdLogFile=$home/%n.log
SlurmctldLogFile=$home/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,sched_min_interval=0
ReturnToService=2
MpiDefault=none
JobRequeue=1
SlurmdTimeout=10
KillWait=20
MinJobAge=3600
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=n[1-$1] NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=[$((port + 1))-$((port + $1))] CPUs=4 RealMemory=2000 State=UNKNOWN
PartitionName=batch Nodes=n[1-$1] Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=n[1-$1] MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
C
  # Debian's slurmd does not start without one of the two versions of cgroups.
  if [ -f /sys/fs/cgroup/cgroup.controllers ]; then v=v2; else v=v1; fi
  printf 'CgroupPlugin=cgroup/%s\nIgnoreSystemd=yes\nCgroupAutomount=no\n' $v >"$home/cgroup.conf"
}

start_munge() {
  mkdir -p "$home/munge"
  chmod 755 "$home" "$home/munge"
  (umask 077 && head -c 1024 /dev/urandom >"$home/munge/key")
  munged --force --key-file "$home/munge/key" --socket "$home/munge/socket" --pid-file "$home/munge/pid" \
    --log-file "$home/munge/log" --seed-file "$home/munge/seed"
}

end() { # the process in a pid file, and wait until it is gone
  [ -f "$1" ] || return 0
  pid=$(cat "$1")
  kill "-${2:-TERM}" "$pid" 2>/dev/null || true
  for _ in $(seq 100); do kill -0 "$pid" 2>/dev/null || break; sleep 0.1; done
  kill -KILL "$pid" 2>/dev/null || true
  rm -f "$1"
}

steps_of() { # the step managers of one machine, which slurmd started; they have its log open
  for process in /proc/[0-9]*; do
    case $(tr '\0' ' ' 2>/dev/null <"$process/cmdline" || true) in
      slurmstepd:*) ls -l "$process/fd" 2>/dev/null | grep -q " $home/$1.log$" && echo "${process#/proc/}" ;;
    esac
  done
  true
}

descendants() {
  for child in $(cat "/proc/$1"/task/*/children 2>/dev/null || true); do descendants "$child"; echo "$child"; done
}

case $1 in
start)
  machines=${3:-3}
  mkdir -p "$home/state"
  configure "$machines"
  start_munge
  slurmctld
  for n in $(seq "$machines"); do mkdir -p "$home/n$n"; slurmd -N "n$n"; done
  for _ in $(seq 60); do
    [ "$(sinfo -h -p batch -t idle -o %D 2>/dev/null)" = "$machines" ] && exit 0
    sleep 0.5
  done
  sinfo >&2 || true
  echo "not all machines are up: see $home/*.log" >&2
  exit 1 ;;
lose) # as a power cut would: the machine's slurmd, its step managers and all they started are gone at once
  [ $# -eq 3 ] || usage
  pids=$(for step in $(steps_of "$3"); do descendants "$step"; echo "$step"; done)
  kill -KILL "$(cat "$home/$3.pid")" $pids 2>/dev/null || true
  rm -f "$home/$3.pid"
  echo "lost $3: slurmd and $(echo $pids | wc -w) processes of its steps" ;;
bring)
  [ $# -eq 3 ] || usage
  slurmd -N "$3" ;;
stop)
  for file in "$home"/n[0-9]*.pid; do
    machine=$(basename "$file" .pid)
    for step in $(steps_of "$machine"); do kill -KILL $(descendants "$step") "$step" 2>/dev/null || true; done
    end "$file"
  done
  end "$home/slurmctld.pid"
  end "$home/munge/pid" ;;
*) usage ;;
esac
