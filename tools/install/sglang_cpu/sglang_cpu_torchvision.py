"""Makes the published torchvision importable together with torch for the CPU.

Its compiled operators need CUDA and are not loaded, but its Python part registers shapes for two of them at import.
These two are declared here when torchvision is imported.
"""

import importlib.abc
import sys

_declared: list[object] = []  # a library that is garbage-collected removes its operators


class _Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name != "torchvision" or _declared:
            return
        import torch

        library = torch.library.Library("torchvision", "DEF")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)


sys.meta_path.insert(0, _Declare())
