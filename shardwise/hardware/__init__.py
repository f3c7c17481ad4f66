"""Chips, links and clusters: their specified peaks, and the share of them that kernels and collectives reach.

Every time is in seconds and every function takes numbers or arrays that broadcast. No torch.
"""

from shardwise.hardware.attention import attention_flops, attention_seconds, kernel_on
from shardwise.hardware.chips import ALIASES, CHIPS, chip_of_driver_name, find_chip
from shardwise.hardware.cluster import Cluster, make_cluster
from shardwise.hardware.collectives import COLLECTIVES, Collective, collective_seconds
from shardwise.hardware.efficiency import memory_seconds
from shardwise.hardware.gemm import (
    alignment,
    gemm_constants,
    gemm_seconds,
    grouped_gemm_seconds,
    grouped_gradient_seconds,
)
from shardwise.hardware.profile import Profile, load_profile

__all__ = [
    "ALIASES",
    "CHIPS",
    "COLLECTIVES",
    "Cluster",
    "Collective",
    "Profile",
    "alignment",
    "attention_flops",
    "attention_seconds",
    "chip_of_driver_name",
    "collective_seconds",
    "find_chip",
    "gemm_constants",
    "gemm_seconds",
    "grouped_gemm_seconds",
    "grouped_gradient_seconds",
    "kernel_on",
    "load_profile",
    "make_cluster",
    "memory_seconds",
]
