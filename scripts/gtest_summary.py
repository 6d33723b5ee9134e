"""Prints how many GoogleTest tests passed, failed and were skipped, with the reasons for skipping.

CTest counts a binary as one test, so it cannot say that. Reads the XML reports of a folder.
"""

import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path


def main() -> None:
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for path in sorted(Path(sys.argv[1]).glob("*.xml")):
        for test in ElementTree.parse(path).iter("testcase"):
            skip = test.find("skipped")
            if skip is not None or test.get("result") == "skipped":
                counts["skipped"] += 1
                message = skip.get("message", "") if skip is not None else ""
                reasons[message.strip().splitlines()[-1] if message.strip() else "no reason"] += 1
            elif test.get("status") == "run":
                counts["failed" if test.find("failure") is not None else "passed"] += 1
    for reason, count in reasons.most_common():
        print(f"GoogleTest: {count} skipped: {reason}")
    print(
        f"GoogleTest: {counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['skipped']} skipped"
    )


if __name__ == "__main__":
    main()
