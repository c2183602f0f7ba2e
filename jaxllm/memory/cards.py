"""Memory of common GPUs, for planning without one."""

from jaxllm.memory.units import MIB

_MIB = {
    "rtx4060-laptop": 8188,
    "rtx3080": 10240,
    "rtx4070": 12282,
    "t4": 15360,
    "rtx4080": 16376,
    "v100-16": 16384,
    "a10": 23028,
    "l4": 23034,
    "rtx3090": 24576,
    "rtx4090": 24564,
    "rtx5090": 32607,
    "v100-32": 32768,
    "a100-40": 40960,
    "l40s": 46068,
    "rtx6000-ada": 49140,
    "h100": 81559,
    "a100-80": 81920,
    "h100-nvl": 95830,
    "gh200": 97871,
    "rtx-pro-6000": 97887,
    "h200": 143156,
    "b200": 183359,
}

CARDS: dict[str, int] = {name: size * MIB for name, size in _MIB.items()}
"""Bytes by name. The H200's is what programs can have, as measured; the others are the totals that nvidia-smi shows, of
which programs get about half a percent less."""


HOPPER = frozenset(name for name in CARDS if name.startswith(("h100", "h200", "gh200")))
"""Those that the Pallas kernels run on."""


def card_bytes(name: str) -> int:
    """Bytes of the card `name`, in any case.

    Raises:
        ValueError: for a card that is not in the table; lists those that are.
    """
    if name.lower() not in CARDS:
        raise ValueError(
            f"device {name!r} is not in the table ({', '.join(CARDS)}); give its size with --device-memory"
        )
    return CARDS[name.lower()]
