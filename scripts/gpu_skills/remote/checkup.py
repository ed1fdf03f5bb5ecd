"""Runs on a machine, once, from standard input: tells about its GPU and its surroundings as one line of JSON.

Standard library only, Python 3.8 and later. The one argument is JSON: {root, reach: [host, port], gpus}. With `look`,
who wants to see a machine that may be at work: nothing is computed unless `compute` is set, and nothing reached.
"""

import ctypes
import json
import os
import re
import socket
import subprocess
import sys

MARK = "GPU-SKILLS-ANSWER "
TORCH_TIMEOUT_S = 200
SMI_CHARS = 8000

# Where images keep the Python that has their libraries; the first that has PyTorch is taken.
PYTHONS = ("python", "python3", "/venv/main/bin/python", "/opt/conda/bin/python", "/workspace/venv/bin/python")

# A matrix product on each GPU, with a result that is known: rows of ones times columns of ones.
TORCH = """
import json, sys
facts = {"how": "torch", "ok": False}
try:
    import torch
except ImportError:
    sys.exit(66)
try:
    facts["version"] = str(torch.__version__)
    facts["built_for"] = getattr(getattr(torch, "version", None), "cuda", None)
    facts["python"] = sys.version.split()[0]
    facts["count"] = torch.cuda.device_count()
    facts["arch_list"] = list(torch.cuda.get_arch_list())
    facts["capabilities"] = []
    if sys.argv[1:] == ["look"]:  # a context of its own would take memory from whoever is at work
        print("FACTS " + json.dumps(facts))
        sys.exit()
    for index in range(facts["count"]):
        major, minor = torch.cuda.get_device_capability(index)
        facts["capabilities"].append(round(major + minor / 10.0, 1))
    for index in range(facts["count"]):
        ones = torch.ones((256, 256), device="cuda:%d" % index)
        total = (ones @ ones).sum().item()
        if total != 256.0 ** 3:
            raise RuntimeError("GPU %d computed %r in place of %r" % (index, total, 256.0 ** 3))
    facts["ok"] = facts["count"] > 0
    if not facts["ok"]:
        facts["error"] = "torch finds no GPU"
except Exception as exc:
    facts["error"] = "%s: %s" % (type(exc).__name__, str(exc)[:600])
print("FACTS " + json.dumps(facts))
"""


def main():
    asked = json.loads(sys.argv[1])
    facts = look(bool(asked.get("compute"))) if asked.get("look") else {"gpu": gpu_operation(int(asked["gpus"]))}
    facts["cuda"] = host_cuda()
    facts["shm_mib"] = size_mib("/dev/shm")
    facts["disk_free_gb"] = free_gb(str(asked["root"]))
    if asked.get("reach"):
        facts["reaches"], facts["reach_error"] = reaches(*asked["reach"])
    print(MARK + json.dumps(facts))


def look(compute):
    """What there is, with nvidia-smi's own table; the GPU is tried only if nobody is at work there."""
    facts = {"gpu": (gpu_operation(1) if compute else by_torch(1, "look")) or {"how": None}}
    code, out, error = run(["nvidia-smi"], 30)
    facts["nvidia_smi"] = None if code == 127 else (out + error)[:SMI_CHARS]
    return facts


def gpu_operation(wanted):
    """The strongest proof there is: PyTorch of the image, else the driver itself, else the word of nvidia-smi."""
    for tried in (by_torch, by_driver, by_smi):
        facts = tried(wanted)
        if facts is not None:
            return facts
    return {"how": None, "ok": False, "error": "no PyTorch, no libcuda and no nvidia-smi"}


def by_torch(wanted, how="compute"):
    for python in PYTHONS:
        code, out, error = run([python, "-c", TORCH, how], TORCH_TIMEOUT_S)
        if code in (66, 127):
            continue
        for line in out.splitlines():
            if line.startswith("FACTS "):
                facts = json.loads(line[6:])
                if facts.get("ok") and facts["count"] < wanted:
                    facts.update(ok=False, error=f"torch finds {facts['count']} GPUs, not {wanted}")
                return facts
        lines = (error or out).strip().splitlines()
        return {"how": "torch", "ok": False, "error": lines[-1][:400] if lines else f"exit code {code}"}
    return None


def by_driver(wanted):
    """Write to each GPU's memory and read it back."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None

    def must(code, what):
        if code:
            raise RuntimeError(f"{what} gave CUDA error {code}")

    count = ctypes.c_int()
    try:
        must(cuda.cuInit(0), "cuInit")
        must(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
        if count.value < wanted:
            raise RuntimeError(f"the driver finds {count.value} GPUs, not {wanted}")
        for index in range(count.value):
            write_and_read(cuda, index, must)
    except (RuntimeError, AttributeError) as exc:
        return {"how": "driver", "ok": False, "error": str(exc), "count": count.value}
    return {"how": "driver", "ok": True, "count": count.value}


def write_and_read(cuda, index, must):
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    must(cuda.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    must(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device), "cuCtxCreate")
    try:
        words = 4096
        must(cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(4 * words)), "cuMemAlloc")
        pattern = 0x5CA1AB1E
        must(cuda.cuMemsetD32_v2(memory, ctypes.c_uint(pattern), ctypes.c_size_t(words)), "cuMemsetD32")
        back = (ctypes.c_uint32 * words)()
        must(cuda.cuMemcpyDtoH_v2(back, memory, ctypes.c_size_t(4 * words)), "cuMemcpyDtoH")
        if any(word != pattern for word in back):
            raise RuntimeError(f"GPU {index} gives back other bytes than were written")
    finally:
        cuda.cuCtxDestroy_v2(context)


def by_smi(wanted):
    code, out, error = run(["nvidia-smi", "--query-gpu=index,name,compute_cap", "--format=csv,noheader,nounits"], 30)
    if code == 127:
        return None
    rows = [line.split(",") for line in out.splitlines() if line.count(",") == 2]
    facts = {"how": "nvidia-smi", "ok": code == 0 and len(rows) >= wanted, "count": len(rows)}
    facts["capabilities"] = [float(row[2]) for row in rows if re.match(r"^\s*\d+\.\d+\s*$", row[2])]
    if not facts["ok"]:
        lines = (out + error).strip().splitlines()
        facts["error"] = lines[-1][:400] if lines else f"exit code {code}"
    return facts


def host_cuda():
    """The newest CUDA that the host's driver allows."""
    try:
        version = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0 and version.value:
            return version.value // 1000 + version.value % 1000 // 10 / 10.0
    except (OSError, AttributeError):
        pass
    found = re.search(r"CUDA Version\s*:\s*(\d+\.\d+)", run(["nvidia-smi"], 30)[1])
    return float(found.group(1)) if found else None


def run(argv, timeout_s):
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            text=True,
            errors="replace",
        )
        return done.returncode, done.stdout, done.stderr
    except OSError:
        return 127, "", ""
    except subprocess.TimeoutExpired:
        return 124, "", f"no answer within {timeout_s} s"


def size_mib(path):
    try:
        disk = os.statvfs(path)
        return round(disk.f_blocks * disk.f_frsize / 1048576)
    except OSError:
        return None


def free_gb(path):
    try:
        disk = os.statvfs(path)
        return round(disk.f_bavail * disk.f_frsize / 1e9, 1)
    except OSError:
        return None


def reaches(host, port):
    for _ in range(2):
        try:
            socket.create_connection((host, port), 10).close()
            return True, None
        except OSError as exc:
            problem = str(exc)
    return False, problem


if __name__ == "__main__":
    main()
