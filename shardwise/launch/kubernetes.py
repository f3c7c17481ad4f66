"""The objects for Kubernetes: a JobSet (jobset.x-k8s.io/v1alpha2) or a Kubeflow TrainJob (trainer.kubeflow.org/v1alpha1).

A pod is a machine. It runs `shardwise train` itself, which meets the other pods at the first one and starts its own ranks: so a
rank that dies is restarted within seconds, and a pod that is asked to end saves within its grace period. It then exits with code
75. The pod failure policy turns this, like an eviction, into a restart of the JobSet that does not count against its limit; other
failures count. The run is embedded in the object as an environment variable, so that no other file is needed.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwise.launch.job import Job
from shardwise.run import to_toml
from shardwise.train.faults.stop import PREEMPTED

PORT = 29500
GPU = "nvidia.com/gpu"
GRACE = 30
"""Seconds that a pod has to end, in addition to `train.save_deadline`."""
RUN_VARIABLE = "SHARDWISE_RUN"
RUNTIME = "torch-distributed"
"""The runtime that Kubeflow installs for PyTorch."""
PLACE = "/runs"


@dataclass(frozen=True)
class Cluster:
    """Kubernetes settings besides the job."""

    claim: str = ""
    """The volume claim for run folders, mounted at `place` on every pod."""
    place: str = PLACE
    namespace: str = ""
    queue: str = ""
    """Kueue's local queue."""


def jobset(job: Job, cluster: Cluster) -> dict[str, Any]:
    """The JobSet of a job."""
    exits = {"containerName": "trainer", "operator": "In", "values": [PREEMPTED]}
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": round(job.run.train.save_deadline) + GRACE,
        "containers": [
            {
                "name": "trainer",
                "image": job.image,
                "command": _command(job, cluster, f"{job.name}-node-0-0.{job.name}:{PORT}"),
                "env": _environment(job),
                "ports": [{"containerPort": PORT}],
                "resources": _resources(job),
                "volumeMounts": _mounts(cluster),
            }
        ],
        "volumes": _volumes(cluster),
    }
    spec: dict[str, Any] = {
        "parallelism": job.nodes,
        "completions": job.nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onExitCodes": exits},
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": {"spec": pod},
    }
    if job.limit:
        spec["activeDeadlineSeconds"] = job.limit
    restart = {
        "name": "goOnLater",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    whole = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": {"maxRestarts": job.run.train.restarts, "rules": [restart]},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": spec}}],
    }
    return _document("jobset.x-k8s.io/v1alpha2", "JobSet", job, cluster, whole)


def trainjob(job: Job, cluster: Cluster) -> dict[str, Any]:
    """The TrainJob of a job; Kubeflow turns it into a JobSet and sets PET_ variables in its pods."""
    spec: dict[str, Any] = {
        "runtimeRef": {"name": RUNTIME, "apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime"},
        "trainer": {
            "image": job.image,
            "command": _command(job, cluster, '"$PET_MASTER_ADDR:$PET_MASTER_PORT"'),
            "env": _environment(job),
            "numNodes": job.nodes,
            "numProcPerNode": job.ranks_per_node,
            "resourcesPerNode": _resources(job),
        },
    }
    if job.limit:
        spec["activeDeadlineSeconds"] = job.limit
    patched = {"containers": [{"name": "node", "volumeMounts": _mounts(cluster)}], "volumes": _volumes(cluster)}
    inner = {"replicatedJobs": [{"name": "node", "template": {"spec": {"template": {"spec": patched}}}}]}
    spec["runtimePatches"] = [{"manager": "shardwise", "trainingRuntimeSpec": {"template": {"spec": inner}}}]
    return _document("trainer.kubeflow.org/v1alpha1", "TrainJob", job, cluster, spec)


def _document(version: str, kind: str, job: Job, cluster: Cluster, spec: dict[str, Any]) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": job.name}
    if cluster.namespace:
        metadata["namespace"] = cluster.namespace
    if cluster.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": cluster.queue}
    return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec}


def _command(job: Job, cluster: Cluster, meeting: str) -> list[str]:
    """A shell command that writes the run's file and then becomes the trainer; `meeting` is the rendezvous as a shell word."""
    folder = f"{cluster.place}/{job.run.name}"
    train = shlex.join([*job.command, "train", "/tmp/run.toml", "--out", folder])
    meet = f" --cluster.rendezvous={meeting}" if job.nodes > 1 else ""
    return ["/bin/sh", "-c", f"printf '%s' \"${RUN_VARIABLE}\" >/tmp/run.toml && exec {train}{meet}"]


def _environment(job: Job) -> list[dict[str, str]]:
    values = {RUN_VARIABLE: to_toml(job.run), **job.environment}
    return [{"name": name, "value": value} for name, value in values.items()]


def _resources(job: Job) -> dict[str, Any]:
    limits: dict[str, Any] = {GPU: job.ranks_per_node} if job.gpus else {}
    if job.cpus_per_rank:
        limits["cpu"] = job.cpus_per_rank * job.ranks_per_node
    return {"limits": limits} if limits else {}


def _mounts(cluster: Cluster) -> list[dict[str, str]]:
    # Ranks of a machine use shared memory (NCCL, the loader), of which a container has only 64 MB by default.
    shared = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    return shared + ([{"name": "runs", "mountPath": cluster.place}] if cluster.claim else [])


def _volumes(cluster: Cluster) -> list[dict[str, Any]]:
    shared: list[dict[str, Any]] = [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}]
    claim = {"name": "runs", "persistentVolumeClaim": {"claimName": cluster.claim}}
    return shared + ([claim] if cluster.claim else [])


def text(document: dict[str, Any], notes: tuple[str, ...] = ()) -> str:
    """An object as YAML."""
    return "\n".join([*(f"# {note}" for note in notes), *_yaml(document, 0), ""])


def _yaml(value: Any, depth: int) -> Iterator[str]:
    """The YAML lines of a mapping or list. Keys are plain words, and a JSON scalar is a YAML scalar. Multi-line text is a block."""
    pad = "  " * depth
    pairs = value.items() if isinstance(value, dict) else ((None, item) for item in value)
    for name, item in pairs:
        head = f"{pad}-" if name is None else f"{pad}{name if '/' not in name else json.dumps(name)}:"
        if isinstance(item, str) and item.endswith("\n") and not item.startswith((" ", "\n")):
            yield f"{head} |"
            yield from (f"{pad}  {line}" if line else "" for line in item.rstrip("\n").split("\n"))
        elif isinstance(item, dict | list) and item:
            below = list(_yaml(item, depth + 1))
            if name is None:  # the first line of a list item stands beside its dash
                below[0] = f"{head} {below[0].lstrip()}"
                yield from below
            else:
                yield from (head, *below)
        else:
            yield f"{head} {json.dumps(item, ensure_ascii=False)}"
