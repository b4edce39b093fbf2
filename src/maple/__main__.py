"""``python -m maple``."""

from maple.cli import main

if __name__ == "__main__":
    main()
