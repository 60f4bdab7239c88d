"""accelerate shards on accelerators alone, and torch on the CPU as well: what a test without a GPU needs of both."""

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

_init = AcceleratorState.__init__


def _sharding(self, *args, fsdp_plugin=None, **options):
    _init(self, *args, fsdp_plugin=fsdp_plugin, **options)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        # As it does where there are several GPUs.
        self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin


def allow() -> None:
    AcceleratorState.__init__ = _sharding
