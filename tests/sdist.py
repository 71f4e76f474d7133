"""Fetches a source distribution as a file: `python tests/sdist.py transformers 5.22.2 FILE`.

`pip download` would run the setup.py of what it fetches, to learn its metadata. Here pip only says where the file is,
by its own configuration, and hands it over; nothing in it is run.
"""

import sys
from pathlib import Path


def fetch(name, version, path):
    """Write the source distribution to a file; LookupError where no index has it."""
    from pip._internal.commands import create_command
    from pip._internal.network.utils import response_chunks

    command, wanted = create_command("download"), f"{name}-{version}.tar.gz"
    options, _ = command.parse_args(["--no-binary", name, "--retries", "1", name])
    with command.main_context():
        session = command.get_default_session(options)
        found = command._build_package_finder(options=options, session=session).find_all_candidates(name)
        links = [item.link for item in found if item.link.filename == wanted]
        if not links:
            raise LookupError(f"no index has {wanted}")
        with session.get(links[0].url_without_fragment, stream=True) as response, path.open("wb") as file:
            response.raise_for_status()
            for chunk in response_chunks(response):
                file.write(chunk)


if __name__ == "__main__":
    fetch(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
