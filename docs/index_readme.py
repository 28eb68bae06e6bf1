"""Rewrites a README for a package index, which shows it away from the repository's files.

    python docs/index_readme.py --repository https://github.com/owner/name --ref v1.0 README.md

Relative links then lead to the file in the repository, and pictures are loaded from there. Without
--repository, pictures are left out, with the caption in the same <p>, and relative links become
plain text. Code stays as it is. The file is changed in place, so call it in a clone that is thrown
away, as the release workflow does.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from urllib.parse import urlsplit

# In the order in which they are tried at each place of the text: what is in code is no link.
PARTS = re.compile(
    r"""(?P<fence> ^```.*?^``` )
      | (?P<picture> <p[^>]*> \s* <img .*? </p>\n* | <img[^>]*> )
      | !\[ (?P<alt> [^\]]* ) \]\( (?P<image> [^)\s]+ ) \)
      |  \[ (?P<words> [^\]]* ) \]\( (?P<target> [^)\s]+ ) \)
      | (?P<code> `[^`]*` )""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
SOURCE = re.compile(r'(?<=src=")[^"]+')


def for_an_index(text: str, folder: Path, repository: str = "", ref: str = "HEAD") -> str:
    """The README's text with addresses that an index can show.

    Args:
        text: the README, as Markdown.
        folder: the folder that the README's relative links start from, the repository's root.
        repository: the address of the repository's page; empty: there is none.
        ref: the tag, branch or commit that the addresses name.

    Raises ValueError for an address that is no web page.
    """
    address = urlsplit(repository.rstrip("/").removesuffix(".git"))
    if repository and (address.scheme not in ("http", "https") or not address.path.strip("/")):
        raise ValueError(
            f"--repository {repository!r}: expected the address of the repository's page, such as "
            "https://github.com/owner/name"
        )

    def page(target: str) -> str:
        path, hash, heading = target.partition("#")
        path = path or "README.md"
        kind = "tree" if (folder / path).is_dir() else "blob"
        return f"{address.geturl()}/{kind}/{ref}/{path}{hash}{heading}"

    def raw(target: str) -> str:
        if address.netloc == "github.com":
            return f"https://raw.githubusercontent.com{address.path}/{ref}/{target}"
        return f"{address.geturl()}/raw/{ref}/{target}"

    def rewritten(part: re.Match[str]) -> str:
        whole = part[0]
        if part["target"] and not is_absolute(part["target"]):
            return f"[{part['words']}]({page(part['target'])})" if repository else part["words"]
        if part["image"] and not is_absolute(part["image"]):
            return f"![{part['alt']}]({raw(part['image'])})" if repository else ""
        if part["picture"] and (source := SOURCE.search(whole)) and not is_absolute(source[0]):
            return whole.replace(source[0], raw(source[0]), 1) if repository else ""
        return whole

    return PARTS.sub(rewritten, text)


def is_absolute(target: str) -> bool:
    return bool(urlsplit(target).scheme)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Rewrite a README in place for a package index.")
    parser.add_argument("readme", type=Path, metavar="README.md")
    parser.add_argument(
        "--repository",
        default="",
        metavar="URL",
        help="the repository's page, e.g. https://github.com/owner/name (default: none; pictures "
        "are left out, and relative links become plain text)",
    )
    parser.add_argument(
        "--ref", default="HEAD", help="the tag, branch or commit to link to (default: HEAD)"
    )
    options = parser.parse_args()
    text = options.readme.read_text(encoding="utf-8")
    try:
        text = for_an_index(text, options.readme.parent, options.repository, options.ref)
    except ValueError as error:
        parser.error(str(error))
    options.readme.write_text(text, encoding="utf-8")
