"""Lending a device to others: storages leave it, wait in host memory, and come back."""

from ._courtesy import Courtesy as Courtesy
from ._report import CourtesyReport as CourtesyReport
from ._report import Stay as Stay
