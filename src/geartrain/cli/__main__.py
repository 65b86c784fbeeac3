"""``python -m geartrain.cli``."""

from geartrain.cli import main

if __name__ == "__main__":
    main(prog_name="geartrain")
