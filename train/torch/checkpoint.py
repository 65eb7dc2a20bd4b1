"""``TorchCheckpoint``: a checkpoint of one model, or of its weights, in one file."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from miniray.common.absent import AbsentAttribute
from miniray.train.storage.checkpoint import Checkpoint, temporary_folder

if TYPE_CHECKING:
    from typing_extensions import Self

_NO_PREPROCESSOR = "apply preprocessing in the train loop"
#: What DDP and DataParallel put before the names of weights.
_WRAPPED = "module."


class TorchCheckpoint(Checkpoint):
    """A ``Checkpoint`` whose folder holds a PyTorch model, or its weights, as ``model.pt``.

    One that was reported comes back as a plain ``Checkpoint``: make it one of these again with
    ``TorchCheckpoint(checkpoint.path, checkpoint.filesystem)``.

    Examples:
        >>> model = torch.nn.Linear(2, 1)
        >>> checkpoint = TorchCheckpoint.from_state_dict(model.state_dict())
        >>> checkpoint.get_model(torch.nn.Linear(2, 1))
        Linear(in_features=2, out_features=1, bias=True)
    """

    MODEL_FILENAME = "model.pt"

    get_preprocessor = AbsentAttribute(_NO_PREPROCESSOR)
    set_preprocessor = AbsentAttribute(_NO_PREPROCESSOR)

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, Any], *, preprocessor: None = None) -> Self:
        """Make a checkpoint of a model's weights, in a new temporary folder.

        Args:
            state_dict: Of the model; one of a model that DDP has wrapped is taken as that of the
                model itself.
            preprocessor: Refused.

        Raises:
            TypeError: The value is not a state dict, or there is a preprocessor.
        """
        _refuse(preprocessor)
        if not isinstance(state_dict, Mapping):
            raise TypeError(
                f"from_state_dict() takes what model.state_dict() returns, not "
                f"{type(state_dict).__name__}. For a whole model there is from_model()."
            )
        if all(name.startswith(_WRAPPED) for name in state_dict):
            state_dict = {name.removeprefix(_WRAPPED): each for name, each in state_dict.items()}
        return cls._of(dict(state_dict))

    @classmethod
    def from_model(cls, model: torch.nn.Module, *, preprocessor: None = None) -> Self:
        """Make a checkpoint of a whole model, in a new temporary folder.

        The model is pickled: its class has to be there when it is loaded, and unpickling can run
        any code. ``from_state_dict`` keeps the weights alone.

        Args:
            model: The model.
            preprocessor: Refused.

        Raises:
            TypeError: The value is not a model, or there is a preprocessor.
        """
        _refuse(preprocessor)
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"from_model() takes a torch.nn.Module, not {type(model).__name__}.")
        return cls._of(model)

    @classmethod
    def _of(cls, content: Any) -> Self:
        folder = temporary_folder()
        torch.save(content, folder / cls.MODEL_FILENAME)
        return cls(folder)

    def get_model(self, model: torch.nn.Module | None = None) -> torch.nn.Module:
        """Return the model, on the CPU. The file is unpickled, which can run any code.

        Args:
            model: Gets the weights and is returned, if the checkpoint has only those.

        Raises:
            FileNotFoundError: The checkpoint does not exist, or has no ``model.pt``.
            ValueError: It has weights only, and there is no ``model`` for them.
        """
        with self.as_directory() as folder:
            path = Path(folder, self.MODEL_FILENAME)
            if not path.exists():
                raise FileNotFoundError(
                    f"{self!r} has no file {self.MODEL_FILENAME}. Make it with "
                    f"TorchCheckpoint.from_state_dict() or from_model(), or load its files with "
                    f"as_directory()."
                )
            content = torch.load(path, map_location="cpu", weights_only=False)
        if isinstance(content, torch.nn.Module):
            if model is not None:
                warnings.warn(
                    f"{self!r} has the whole model: the one given to get_model() is not used.",
                    UserWarning,
                    stacklevel=2,
                )
            return content
        if model is None:
            raise ValueError(
                f"{self!r} has the weights of a model only: give get_model() a model for them."
            )
        model.load_state_dict(content)
        return model


def _refuse(preprocessor: object) -> None:
    if preprocessor is not None:
        raise TypeError(f"A TorchCheckpoint has no preprocessor in miniray: {_NO_PREPROCESSOR}.")
