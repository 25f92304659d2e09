import dataclasses
import os
import subprocess
import sys
from typing import Any

import pytest

from turngym.sandboxes import Limits
from turngym.sandboxes.bundle import container_program, program
from turngym.sandboxes.inside.frames import FrameReader, encode


def test_programs_fit_into_one_argument() -> None:
    assert len(program("zygote", {}).encode()) < 100_000  # the kernel allows 131,072
    assert len(container_program().encode()) < 100_000


def test_the_driver_hides_itself_from_what_it_runs() -> None:
    code = program("frames", {}).replace("module.main({})", "print(sorted(sys.modules))")
    run = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "turngym" not in run.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a PID namespace around the driver")
def test_a_container_driver_serves_over_its_standard_streams(tmp_path: object) -> None:
    command = ["unshare", "--pid", "--fork", "--mount-proc"]
    driver = subprocess.Popen(
        [*command, sys.executable, "-I", "-c", container_program()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert driver.stdin is not None
    assert driver.stdout is not None
    limits = dataclasses.asdict(Limits())
    requests = [
        encode({"op": "configure", "limits": limits, "workspace": str(tmp_path)}),
        encode({"op": "write", "id": 1, "path": "f"}, b"data"),
        encode({"op": "nonsense", "id": 2}),
        encode({"op": "execute", "id": 3, "timeout_s": 20}, b"print('hi')\nopen('f').read()"),
    ]
    driver.stdin.write(b"".join(requests))
    driver.stdin.flush()
    reader = FrameReader()
    frames: list[dict[str, Any]] = []
    while len(frames) < 4:
        data = os.read(driver.stdout.fileno(), 1 << 16)
        assert data, "the driver ended"
        reader.feed(data)
        while (frame := reader.next()) is not None:
            if frame[0].get("event") != "asleep":  # may come once while the cell runs
                frames.append(frame[0])
    driver.stdin.close()
    assert driver.wait(10) == 0
    driver.stdout.close()
    assert (frames[0]["event"], frames[0]["protocol"]) == ("ready", 1)
    assert frames[1] == {"id": 1, "ok": True}
    assert frames[2]["message"] == "no operation 'nonsense'"
    assert (frames[3]["stdout"], frames[3]["result"]) == ("hi\n", "'data'")
