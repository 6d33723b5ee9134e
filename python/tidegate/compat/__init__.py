"""Other libraries' calls, backed by tidegate: a script changes its import line and nothing else.

- :mod:`tidegate.compat.fla`: flash-linear-attention's ops and layers;
- :mod:`tidegate.compat.forgetting_transformer`: the Forgetting Transformer's release.

Signatures, defaults, shapes and what is returned are those libraries'. What has no counterpart here
raises NotImplementedError, by its name. ``import tidegate`` imports none of this.
"""
