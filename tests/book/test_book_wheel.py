"""The wheel carries what a chapter needs where there is no checkout."""

from __future__ import annotations

import zipfile

import build


def test_the_wheel_holds_the_package_and_its_data(wheel):
    with zipfile.ZipFile(wheel) as archive:
        inside = set(archive.namelist())
    code = {p.relative_to(build.ROOT) for p in (build.ROOT / "csloc_utils").rglob("*.py")}
    assert {path.as_posix() for path in code} <= inside
    data = {p.relative_to(build.ROOT) for p in (build.ROOT / "data").rglob("*") if p.is_file()}
    assert {f"csloc_utils/{path.as_posix()}" for path in data} <= inside
    assert not [name for name in inside if name.startswith(("tests/", "book/", "notebooks/"))]
