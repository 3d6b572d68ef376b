"""Batches whose tensors hold one sample a row: how they are cut, and put together again."""

from ._compiled_inputs import expecting_other_sizes_of as expecting_other_sizes_of
from ._cut_inputs import CutInputs as CutInputs
from ._cut_inputs import used_up_graph_error as used_up_graph_error
from ._outputs import JoinedOutputs as JoinedOutputs
from ._outputs import Outputs as Outputs
from ._sample_tree import Leaf as Leaf
from ._sample_tree import SampleDims as SampleDims
from ._sample_tree import SampleTree as SampleTree
from ._sample_tree import cut_off as cut_off
