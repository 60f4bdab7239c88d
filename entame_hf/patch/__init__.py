"""Apply ENTAME to a model, fold it again, freeze parts of a model, wrap a timm model."""

from .apply import apply_entame, set_applied, set_feature_norm
from .features import (
    HeadFeatures,
    class_indices,
    collect_features,
    collect_statistics,
    inputs_and_labels,
    restored_modes,
    run_model,
)
from .fit import HeadFit, collect_head_features, fit_head, fit_to_features
from .fold import check_bias, fold_entame, folded, folded_parameters, normalised_heads, stock_state_dict
from .freezing import (
    BATCH_NORMS,
    frozen_backbone,
    frozen_backbone_parameters,
    frozen_statistics,
    unsaved_batch_norms,
)
from .probe import Probe, log_evidence, probe_features
from .ridge import fit_ridge
from .saving import class_names, shareable_config
from .state import applied_config, clear_entame_state, describe_adaptation, has_trained_head, set_trained
from .wrapping import as_transformers, label_maps, timm_processor

__all__ = [
    "BATCH_NORMS",
    "HeadFeatures",
    "HeadFit",
    "Probe",
    "applied_config",
    "apply_entame",
    "as_transformers",
    "check_bias",
    "class_indices",
    "class_names",
    "clear_entame_state",
    "collect_features",
    "collect_head_features",
    "collect_statistics",
    "describe_adaptation",
    "fit_head",
    "fit_ridge",
    "fit_to_features",
    "fold_entame",
    "folded",
    "folded_parameters",
    "frozen_backbone",
    "frozen_backbone_parameters",
    "frozen_statistics",
    "has_trained_head",
    "inputs_and_labels",
    "label_maps",
    "log_evidence",
    "normalised_heads",
    "probe_features",
    "restored_modes",
    "run_model",
    "set_applied",
    "set_feature_norm",
    "set_trained",
    "shareable_config",
    "stock_state_dict",
    "timm_processor",
    "unsaved_batch_norms",
]
