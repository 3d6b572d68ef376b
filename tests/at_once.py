"""Runs commands at once: the first on the terminal; what the others print comes behind it, whole.

Fails if one of them fails. No shell's ``&``: what that runs would not hear an interrupt.
"""

import shutil
import subprocess
import sys
import tempfile


def main(first: str, *others: str) -> int:
    outputs = [tempfile.TemporaryFile() for _ in others]
    running = [
        subprocess.Popen(other, shell=True, stdout=output, stderr=subprocess.STDOUT)
        for other, output in zip(others, outputs, strict=True)
    ]
    codes = [subprocess.call(first, shell=True)]
    for process, output in zip(running, outputs, strict=True):
        codes.append(process.wait())
        output.seek(0)
        shutil.copyfileobj(output, sys.stdout.buffer)
        sys.stdout.flush()
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
