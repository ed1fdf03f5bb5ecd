"""What RunPod's disks cost, and how a wanted disk becomes theirs. Published per GB and month; a month is 720 hours.

The container disk is wiped at a stop, so the workspace stands on a volume disk of its own (or on a network volume).
"""

from __future__ import annotations

from decimal import Decimal

HOURS_PER_MONTH = 720
CONTAINER_DISK_GB = 30  # for what is installed beside the image
MIN_VOLUME_GB = 10
_RUNNING_GB_MONTH = Decimal("0.10")
_STOPPED_GB_MONTH = Decimal("0.20")
_NETWORK_GB_MONTH = Decimal("0.07")
_NETWORK_LARGE_GB_MONTH = Decimal("0.05")  # of what is above 1 TB


def volume_gb(disk_gb: float | None) -> int:
    """The volume disk for a wanted size."""
    return max(MIN_VOLUME_GB, -int(-(disk_gb or 0) // 1))


def running_usd_hr(container_gb: float, persistent_gb: float) -> Decimal:
    return Decimal(str(container_gb + persistent_gb)) * _RUNNING_GB_MONTH / HOURS_PER_MONTH


def stopped_usd_hr(persistent_gb: float) -> Decimal:
    """The container disk is gone then; the volume disk costs twice as much as while running."""
    return Decimal(str(persistent_gb)) * _STOPPED_GB_MONTH / HOURS_PER_MONTH


def network_usd_hr(size_gb: float) -> Decimal:
    size = Decimal(str(size_gb))
    first = min(size, Decimal(1000))
    return (first * _NETWORK_GB_MONTH + (size - first) * _NETWORK_LARGE_GB_MONTH) / HOURS_PER_MONTH
