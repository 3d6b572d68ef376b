"""Lending a device to others: storages leave it, wait in host memory, and come back."""

from ._courtesy import Courtesy as Courtesy
from ._courtesy import CourtesyReport as CourtesyReport
from ._inventory import Stay as Stay
