"""How many bytes may be alive in all, from what the user says of them."""

from __future__ import annotations

import torch

from tenure._errors import AdaptiveUsageError
from tenure._text import parse_bytes, parse_share

from .._memory import meter_for


def allowed_bytes(budget: int | str, margin: float, device: torch.device, held_bytes: int) -> int:
    """What may be alive on a device at the worst moment.

    Args:
        budget: bytes in all, or like ``"24GiB"``; or ``"80%"`` of what is free now, beside what the
            work holds already.
        margin: the share of it to be left.
        device: whose memory it is.
        held_bytes: what the work holds on the device already.

    Raises:
        ByteSizeError: it is no number of bytes.
        AdaptiveUsageError: the share or the margin can't be read, or nobody tells what is free.
    """
    if not 0 <= margin < 1:
        raise AdaptiveUsageError(
            f"plan() got margin={margin!r}. It is a share of the budget, from 0 to below 1."
        )
    share = parse_share(budget)
    if share is None:
        return int(parse_bytes(budget) * (1 - margin))
    if not share:
        raise AdaptiveUsageError(
            f"plan() got budget={budget!r}. A share goes from above 0% to 100%."
        )
    return held_bytes + int(_free_bytes(device) * share * (1 - margin))


def _free_bytes(device: torch.device) -> int:
    meter = meter_for(str(device))
    if meter is None:
        raise AdaptiveUsageError(
            f"plan() can't tell how much of {device} is free, of which budget= is a share. Give "
            'it in bytes, such as "24GiB".'
        )
    return meter.available_bytes()
