"""``python -m astrai_cli`` is the ``astrai`` command."""

from __future__ import annotations

from astrai_cli.main import main

if __name__ == "__main__":
    main()
