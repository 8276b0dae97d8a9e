"""What `make times` prints of the file that pytest leaves: sums by folder, file and test, the largest first."""

from __future__ import annotations

from pathlib import Path

import pytest
import suite_time

XML = """<testsuites><testsuite>
<testcase classname="tests.cli.test_main" name="test_a[x]" time="1.5"/>
<testcase classname="tests.cli.test_main" name="test_a[y]" time="0.5"/>
<testcase classname="tests.backends.nki.test_sums" name="test_b" time="3.0"/>
</testsuite></testsuites>"""


def test_seconds_are_summed_by_folder_file_and_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tests.xml").write_text(XML)
    suite_time.main([str(tmp_path / "tests.xml"), "--lines", "1"])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line]
    assert lines[0][:2] == ["5.0", "3"]
    found = [(name, seconds) for seconds, _, name in lines[1:] if seconds != "seconds"]
    assert found == [
        ("tests/backends/nki", "3.0"),
        ("tests/backends/nki/test_sums", "3.0"),
        ("tests/backends/nki/test_sums::test_b", "3.0"),
    ]
    assert [(ran.test, ran.seconds) for ran in suite_time.read(tmp_path / "tests.xml")][:2] == [
        ("test_a", 1.5), ("test_a", 0.5)
    ]  # fmt: skip
