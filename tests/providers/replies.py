"""Replies in the vendors' shapes, with made-up values: each function gives a complete row and takes what differs."""

from __future__ import annotations

from typing import Any


def vast_offer(**changes: Any) -> dict[str, Any]:
    return {
        "id": 31001,
        "ask_contract_id": 31001,
        "bundle_id": 901,
        "machine_id": 4711,
        "host_id": 77,
        "num_gpus": 1,
        "gpu_name": "RTX 4090",
        "gpu_frac": 0.25,
        "gpu_ram": 24564,
        "gpu_total_ram": 24564,
        "cpu_ram": 257000,
        "cpu_cores": 64,
        "cpu_cores_effective": 16.0,
        "disk_space": 640.0,
        "disk_bw": 3200.0,
        "inet_up": 700.0,
        "inet_down": 850.0,
        "inet_up_cost": 0.002,
        "inet_down_cost": 0.001,
        "dph_base": 0.30,
        "dph_total": 0.35,
        "min_bid": 0.12,
        "is_bid": False,
        "storage_cost": 0.36,
        "storage_total_cost": 0.05,
        "reliability": 0.992,
        "reliability2": 0.992,
        "verification": "verified",
        "rentable": True,
        "rented": False,
        "duration": 864000.0,
        "geolocation": "Sweden, SE",
        "cuda_max_good": 12.8,
        "driver_version": "570.86.15",
        "direct_port_count": 120,
        "static_ip": True,
        **changes,
    }


def vast_instance(**changes: Any) -> dict[str, Any]:
    return {
        "id": 20517,
        "actual_status": "running",
        "intended_status": "running",
        "cur_state": "running",
        "next_state": "running",
        "status_msg": "success, running image\n",
        "label": "gpu1-abc-int-1",
        "image_uuid": "pytorch/pytorch:2.8.0",
        "image_runtype": "ssh_direc ssh_proxy",
        "extra_env": [["HF_TOKEN", "made-up-secret"]],
        "ssh_host": "ssh4.vast.ai",
        "ssh_port": 20516,
        "public_ipaddr": "203.0.113.9 \n",
        "ports": {"22/tcp": [{"HostIp": "0.0.0.0", "HostPort": "41022"}, None]},
        "machine_id": 4711,
        "geolocation": "Sweden, SE",
        "dph_base": 0.30,
        "dph_total": 0.325,
        "min_bid": 0.12,
        "is_bid": False,
        "storage_cost": 0.36,
        "storage_total_cost": 0.025,
        "instance": {"gpuCostPerHour": 0.30, "diskHour": 0.025, "totalHour": 0.325},
        "search": {"totalHour": 0.325},
        "start_date": 1767323000.5,
        "end_date": 1767923000.0,
        "num_gpus": 1,
        "gpu_name": "RTX 4090",
        "gpu_ram": 24564,
        "disk_space": 50.0,
        "disk_usage": -1,
        **changes,
    }


def vast_page(*rows: Any, token: str | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "success": True,
        "instances_found": len(rows),
        "total_instances": len(rows),
        "label_counts": {},
        "next_token": token,
        "instances": list(rows),
        **changes,
    }


def gpu_type(**changes: Any) -> dict[str, Any]:
    return {
        "id": "NVIDIA GeForce RTX 4090",
        "name": "RTX 4090",
        "pool": "ADA_24",
        "manufacturer": "NVIDIA",
        "memory": 24,
        "secure": True,
        "community": True,
        "price": {"secure": 0.69, "community": 0.34},
        "maxCount": {"secure": 8, "community": 4},
        "availability": "HIGH",
        "dataCenters": [
            {"id": "EU-RO-1", "name": "Romania", "availability": "HIGH"},
            {"id": "US-TX-3", "name": "Texas", "availability": "NONE"},
        ],
        "cudaVersions": [{"version": "12.8", "available": True}, {"version": "12.4", "available": True}],
        **changes,
    }


def pod(**changes: Any) -> dict[str, Any]:
    return {
        "id": "k3x9abcd01",
        "name": "gpu1-abc-int-1",
        "status": "RUNNING",
        "actions": ["stop", "restart", "terminate"],
        "image": "pytorch/pytorch:2.8.0",
        "args": "",
        "disk": 30,
        "env": {"HF_TOKEN": "made-up-secret"},
        "ports": ["22/tcp"],
        "registry": None,
        "mounts": {"persistent": {"size": 50, "path": "/workspace"}},
        "gpu": {"id": "NVIDIA GeForce RTX 4090", "count": 1},
        "cloud": "SECURE",
        "dataCenterId": "EU-RO-1",
        "cudaVersion": "12.8",
        "template": None,
        "cost": 0.69,
        "locked": False,
        "globalNetworking": {"enabled": False},
        "ssh": {
            "proxy": {"host": "ssh.runpod.io", "port": 22, "username": "k3x9abcd01-64411a2b", "command": "ssh …"},
            "direct": {"host": "203.0.113.40", "port": 10341, "username": "root", "command": "ssh …"},
        },
        "runtime": {"uptime": 60, "ports": [{"private": 22, "public": 10341, "type": "tcp", "ip": "203.0.113.40"}]},
        "createdAt": "2026-01-02T03:00:00Z",
        "startedAt": "2026-01-02T03:01:00Z",
        **changes,
    }
