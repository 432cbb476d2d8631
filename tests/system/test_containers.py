"""The commands of Dockerfile and apptainer.def in a fresh Debian, as no registry may be near."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from tests.replicas import sample_texts, write_checkpoint

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.system, pytest.mark.timeout(1800)]


def read_dockerfile():
    """The instructions of the Dockerfile, none of which has several lines."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert not [line for line in lines if line.endswith("\\")]
    return [tuple(line.split(" ", 1)) for line in lines]


def read_definition():
    """The sections of apptainer.def, by name, as stripped lines."""
    text = (ROOT / "apptainer.def").read_text(encoding="utf-8")
    header, *sections = re.split(r"^%", text, flags=re.MULTILINE)
    parsed = {"header": header.splitlines()}
    for section in sections:
        name, *lines = section.splitlines()
        parsed[name] = [line.strip() for line in lines if line.strip()]
    return parsed


def test_both_files_describe_the_same_image():
    found = {}
    for word, rest in read_dockerfile():
        found.setdefault(word, []).append(rest)
    definition = read_definition()
    assert [f"From: {image}" for image in found["FROM"]] == definition["header"][-2:-1]
    assert found["ARG"] == definition["arguments"]
    copied = [name for line in found["COPY"] for name in line.split()[:-1]]
    assert [f"{name} /src/" for name in copied] == definition["files"]
    post = "\n".join(definition["post"])
    assert "\n".join(found["RUN"]) == re.sub(r"\{\{ (\w+) \}\}", r"$\1", post)
    assert [f"export {line}" for line in found["ENV"]] == definition["environment"]
    assert definition["runscript"] == ['exec {} "$@"'.format(*json.loads(found["ENTRYPOINT"][0]))]


# Runs the steps in a Debian whose mounts go with the process. It sees folders of packages that pip
# is told of.
BUILD = """
set -eu
sh tests/system/on-debian bookworm true
root=$PYTHONS/bookworm
bind() { mkdir -p "$2" && mount --bind "$1" "$2"; }
bind . "$root/checkout"
bind "$PYTHONS/work" "$root/work"
for folder in ${PIP_FIND_LINKS:-}; do bind "$folder" "$root$folder"; done
exec chroot "$root" sh -eux /work/steps
"""
SHELL = {
    "FROM": "cd /",
    "ARG": "{0}",
    "ENV": "export {0}",
    "COPY": "mkdir -p /src && cd /checkout && cp -r {0}",
    "RUN": "cd / && {0}",
    "WORKDIR": "cd {0}",
}


@pytest.mark.slow
def test_a_fresh_debian_becomes_an_image_that_classifies(tmp_path):
    if os.geteuid():
        pytest.fail("this test makes a Debian: run it as root", pytrace=False)
    *instructions, (_, entry_point) = read_dockerfile()
    steps = [SHELL[word].format(rest) for word, rest in instructions]
    number = max(n for n, (word, _) in enumerate(instructions) if word == "ARG")
    steps.insert(number + 1, "TORCH_INDEX=file:///none")  # torch's own index may not be near
    (command,) = json.loads(entry_point)
    steps.append(f"{command} classify in.jsonl out --classifier checkpoint --model ./model")
    texts = sample_texts(20)
    work = tmp_path / "work"
    work.mkdir()
    (work / "steps").write_text("\n".join(steps))
    (work / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    write_checkpoint(work / "model")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", BUILD],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "", "PYTHONS": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert not os.path.ismount(tmp_path / "bookworm/dev"), "what follows would remove devices"
    shutil.rmtree(tmp_path / "bookworm")  # gigabytes
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    frame = pd.read_parquet(work / "out")
    assert frame["text"].tolist() == texts
    assert frame["preds"].notna().all()
