"""`mlx-spec enable` and `disable`: the plugin for mlx_lm's own commands of a Python environment.

When Python starts it runs the lines of .pth files in site-packages that begin with `import`. Ours
looks at the words of the command line, and runs switch.py where one of them names mlx_lm.
"""

import os
from pathlib import Path

from mlx_spec.errors import SpecError

FILE = "mlx-spec.pth"
SWITCH = Path(__file__).with_name("switch.py")


def pth_line(switch: Path = SWITCH) -> str:
    """A line that does nothing where mlx_lm is not named or `switch` is gone."""
    path = ascii(str(switch))
    return (
        f"import os, sys; 'mlx_lm' in str(sys.orig_argv) and os.path.isfile({path}) and "
        f"exec(__import__('pathlib').Path({path}).read_bytes(), {{'__name__': '__main__'}})\n"
    )


def enable(site_packages: Path) -> Path:
    """Write the .pth file, or write it again.

    Returns its path. Raises SpecError where it cannot be written.
    """
    path = site_packages / FILE
    beside = path.with_suffix(".new")
    try:
        beside.write_text(pth_line(), encoding="ascii")
        os.replace(beside, path)
    except OSError as error:
        raise SpecError(
            f"{path} cannot be written ({error.strerror}); install mlx-spec in a virtual "
            "environment of your own."
        ) from error
    return path


def disable(site_packages: Path) -> Path | None:
    """Remove the .pth file.

    Returns its path, None where there was none. Raises SpecError where it cannot be removed.
    """
    path = site_packages / FILE
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SpecError(f"{path} cannot be removed ({error.strerror}); delete it.") from error
    return path
