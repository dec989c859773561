"""The commands of docs/retrieval.md are run, on a tiny corpus and a tiny encoder."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sentence_transformers")

from negchain.cli import compare  # noqa: E402
from negchain.cli import run as command_line  # noqa: E402
from tasks.tiny_texts import write_beir, write_model  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs" / "retrieval.md"


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("all-MiniLM-L6-v2"))
    write_beir(Path("scifact"))
    write_beir(Path("wikiqa"))

    def copied(plan: compare.Plan, first) -> SimpleNamespace:
        """A finished run in no time: the first command's, with the settings it would have had."""
        path, config, _ = plan
        shutil.copytree("runs/scifact", path)
        known = json.loads((path / "config.json").read_text())
        known |= {name: getattr(config, name) for name in ("method", "seed", "beta", "lr")}
        (path / "config.json").write_text(json.dumps(known))
        return SimpleNamespace(poll=lambda: 0, returncode=0)

    monkeypatch.setattr(compare, "_launch", copied)
    blocks = re.findall(r"^```(sh|py)\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    assert [kind for kind, _ in blocks] == ["sh", "py", "sh", "sh"]
    for kind, text in blocks:
        if kind == "py":
            exec(compile(text, str(PAGE), "exec"), space := {"__name__": "page"})
            assert space["scores"].shape == (1, 1)
            continue
        program, *words = shlex.split(text)
        quiet = [] if words[0] == "evaluate" else ["--quiet"]
        assert program == "negchain" and command_line([*words, "--device", "cpu", *quiet]) == 0
    assert len([p for p in Path("runs/which").iterdir() if p.is_dir()]) == 4 * 4 + 4 * 2
    assert "Recommended: none of these." in " ".join(capsys.readouterr().out.split())
    assert "Recommended: none of these." in Path("runs/which/report.html").read_text()
