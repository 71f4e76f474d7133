"""`python -m benchmarks.processors COMMAND ...`: run a command as processors run it that round differently.

A sum in another order has other last bits, and the order depends on the instruction set and the number of threads: a
training of a few hundred steps then ends elsewhere. The settings below make one x86 machine compute as others do; for
each of them the hash of one small training step shows whether it does here.
"""

import os
import subprocess
import sys

SETTINGS = {
    "SSE4.1": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "OMP_NUM_THREADS": "1"},
    "AVX2, 2 threads": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "2"},
    "AVX2 for convolutions": {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1"},
}
STEP = """
import hashlib, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU(),
    torch.nn.Conv2d(16, 32, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10))
model(torch.rand(32, 3, 32, 32)).softmax(1)[:, 0].sum().backward()
print(hashlib.sha256(b"".join(p.grad.numpy().tobytes() for p in model.parameters())).hexdigest()[:8])
"""


def environment(setting: dict[str, str]) -> dict[str, str]:
    """The environment of a process under a setting."""
    # threads that wait for each other must not keep a core busy meanwhile
    return {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", **setting}


def bits(setting: dict[str, str]) -> str:
    """Hash of the gradients of one training step under a setting."""
    command = [sys.executable, "-c", STEP]
    return subprocess.run(command, env=environment(setting), check=True, capture_output=True, text=True).stdout.strip()


def main(command: list[str]) -> int:
    """Run the command under every setting; 0 if it succeeded under all of them."""
    if not command:
        raise SystemExit("name a command, e.g. `python -m benchmarks.processors python -m pytest -m numbers`.")
    print(f"== this machine: bits {bits({})}", flush=True)
    failed = []
    for name, setting in SETTINGS.items():
        words = " ".join(f"{key}={value}" for key, value in setting.items())
        print(f"== {name}: bits {bits(setting)} ({words})", flush=True)
        if subprocess.run(command, env=environment(setting)).returncode:
            failed.append(name)
    print(f"== failed under {'; '.join(failed)}" if failed else f"== passed under {'; '.join(SETTINGS)}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
