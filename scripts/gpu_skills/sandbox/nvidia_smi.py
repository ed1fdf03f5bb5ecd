"""The `nvidia-smi` of an instance: reports the GPUs and the driver of the offer that was rented.

Runs inside the instance, alone, on whatever Python is there (3.8 and later). The first argument is the report that the
sandbox keeps for the instance; the rest is the command line of the real program: the plain table, `-L`, `-q`, and
`--query-gpu=… --format=csv[,noheader][,nounits]` with `-i`.
"""

from __future__ import annotations

import json
import sys
from typing import Any

# query name → (field of a GPU in the report, unit)
FIELDS: dict[str, tuple[str, str]] = {
    "index": ("index", ""),
    "name": ("name", ""),
    "gpu_name": ("name", ""),
    "uuid": ("uuid", ""),
    "gpu_uuid": ("uuid", ""),
    "serial": ("serial", ""),
    "gpu_serial": ("serial", ""),
    "pci.bus_id": ("bus_id", ""),
    "gpu_bus_id": ("bus_id", ""),
    "driver_version": ("driver_version", ""),
    "compute_cap": ("compute_cap", ""),
    "memory.total": ("memory_mib", "MiB"),
    "memory.used": ("memory_used_mib", "MiB"),
    "memory.free": ("memory_free_mib", "MiB"),
    "memory.reserved": ("memory_reserved_mib", "MiB"),
    "utilization.gpu": ("utilization_pct", "%"),
    "utilization.memory": ("memory_utilization_pct", "%"),
    "temperature.gpu": ("temperature_c", ""),
    "power.draw": ("power_w", "W"),
    "power.limit": ("power_limit_w", "W"),
    "pstate": ("pstate", ""),
    "persistence_mode": ("persistence_mode", ""),
    "compute_mode": ("compute_mode", ""),
    "mig.mode.current": ("mig_mode", ""),
    "ecc.mode.current": ("ecc_mode", ""),
    "ecc.errors.uncorrected.volatile.total": ("ecc_errors", ""),
    "clocks.sm": ("clock_mhz", "MHz"),
    "clocks.max.sm": ("max_clock_mhz", "MHz"),
    "fan.speed": ("fan_pct", "%"),
    "count": ("count", ""),
    "timestamp": ("timestamp", ""),
}
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n"
)


def main(argv: list[str]) -> int:
    with open(argv[0], encoding="utf-8") as stream:
        report = json.load(stream)
    arguments = argv[1:]
    if report.get("failed"):
        sys.stdout.write(NO_DRIVER)
        return 9
    gpus = _gpus(report)
    if not gpus:
        sys.stdout.write("No devices were found\n")
        return 6
    query = _option(arguments, "--query-gpu")
    if query is not None:
        return _print_query(query, _option(arguments, "--format") or "", _chosen(gpus, arguments))
    if any(argument.startswith("--query-") for argument in arguments):
        return 0  # processes, accounts: there are none
    if "-L" in arguments or "--list-gpus" in arguments:
        for gpu in gpus:
            print("GPU {index}: {name} (UUID: {uuid})".format(**gpu))
        return 0
    if "-q" in arguments or "--query" in arguments:
        _print_details(report, _chosen(gpus, arguments))
        return 0
    _print_table(report, _chosen(gpus, arguments))
    return 0


def _gpus(report: dict[str, Any]) -> list[dict[str, Any]]:
    import time

    filled = []
    for index, gpu in enumerate(report["gpus"]):
        used = int(gpu.get("memory_used_mib", 1))
        filled.append(
            {
                "index": index,
                "serial": "[N/A]",
                "bus_id": f"00000000:{index + 1:02X}:00.0",
                "driver_version": report["driver_version"],
                "memory_used_mib": used,
                "memory_free_mib": int(gpu["memory_mib"]) - used,
                "memory_reserved_mib": 0,
                "utilization_pct": 0,
                "memory_utilization_pct": 0,
                "temperature_c": 34,
                "power_w": "24.50",
                "power_limit_w": "450.00",
                "pstate": "P8",
                "persistence_mode": "Enabled",
                "compute_mode": "Default",
                "mig_mode": "[N/A]",
                "ecc_mode": "[N/A]",
                "ecc_errors": "[N/A]",
                "clock_mhz": 210,
                "max_clock_mhz": 2520,
                "fan_pct": 0,
                "count": len(report["gpus"]),
                "timestamp": time.strftime("%Y/%m/%d %H:%M:%S.000", time.gmtime()),
                **gpu,
            }
        )
    return filled


def _option(arguments: list[str], name: str) -> str | None:
    for place, argument in enumerate(arguments):
        if argument.startswith(name + "="):
            return argument[len(name) + 1 :]
        if argument == name and place + 1 < len(arguments):
            return arguments[place + 1]
    return None


def _chosen(gpus: list[dict[str, Any]], arguments: list[str]) -> list[dict[str, Any]]:
    wanted = _option(arguments, "-i") or _option(arguments, "--id")
    if wanted is None:
        return gpus
    names = wanted.split(",")
    return [gpu for gpu in gpus if str(gpu["index"]) in names or gpu["uuid"] in names or gpu["bus_id"] in names]


def _print_query(query: str, how: str, gpus: list[dict[str, Any]]) -> int:
    names = [name.strip() for name in query.split(",")]
    for name in names:
        if name not in FIELDS:
            print(f'Field "{name}" is not a valid field to query.\n')
            return 2
    style = how.split(",")
    if "csv" not in style:
        print("Option --format= must be given with csv")
        return 1
    units = "nounits" not in style
    if "noheader" not in style:
        print(", ".join(name + (f" [{FIELDS[name][1]}]" if FIELDS[name][1] else "") for name in names))
    for gpu in gpus:
        cells = []
        for name in names:
            field, unit = FIELDS[name]
            value = str(gpu[field])
            cells.append(f"{value} {unit}" if unit and units and not value.startswith("[") else value)
        print(", ".join(cells))
    return 0


def _print_details(report: dict[str, Any], gpus: list[dict[str, Any]]) -> None:
    print("\n==============NVSMI LOG==============\n")
    for label, value in (
        ("Driver Version", report["driver_version"]),
        ("CUDA Version", report["cuda_version"]),
        ("Attached GPUs", len(report["gpus"])),
    ):
        print(f"{label:<42}: {value}")
    for gpu in gpus:
        print("GPU {bus_id}".format(**gpu))
        for label, value in (
            ("Product Name", gpu["name"]),
            ("GPU UUID", gpu["uuid"]),
            ("FB Memory Usage Total", "{memory_mib} MiB".format(**gpu)),
            ("FB Memory Usage Used", "{memory_used_mib} MiB".format(**gpu)),
        ):
            print(f"    {label:<38}: {value}")


def _print_table(report: dict[str, Any], gpus: list[dict[str, Any]]) -> None:
    line = "+" + "-" * 89 + "+"
    middle = "+" + "-" * 41 + "+" + "-" * 24 + "+" + "-" * 22 + "+"
    print(line)
    version = report["driver_version"]
    print(f"| NVIDIA-SMI {version:<24}Driver Version: {version:<16} CUDA Version: {report['cuda_version']:<5} |")
    print(middle)
    print(f"| GPU  {'Name':<24}{'Persist.-M':>10} | {'Bus-Id':<15}{'Disp.A':>7} | {'Vol. ECC':>20} |")
    print(f"| {'Fan  Temp  Perf   Pwr:Usage/Cap':<39} | {'Memory-Usage':>22} | {'GPU-Util  Compute M.':>20} |")
    print(middle.replace("-", "="))
    for gpu in gpus:
        memory = "{memory_used_mib}MiB / {memory_mib}MiB".format(**gpu)
        power = f"{float(gpu['power_w']):.0f}W / {float(gpu['power_limit_w']):.0f}W"
        print(f"| {gpu['index']:>3}  {gpu['name']:<28}{'On':>6} | {gpu['bus_id']:<17}{'Off':>5} | {'N/A':>20} |")
        health = f"{gpu['fan_pct']:>2}%  {gpu['temperature_c']:>3}C   P8"
        print(f"| {health} {power:>23} | {memory:>22} | {'0%   Default':>20} |")
        print(middle)
    print()
    print(line)
    print(f"| {'Processes:':<87} |")
    print(f"| {'  No running processes found':<87} |")
    print(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
