"""The suite that every backend must pass: what `cllm.backend` promises, tried on the backend itself.

For the author of a plugin. Install cLLM beside your distribution, with pytest, and run::

    python -m pytest --pyargs cllm.testing.contract --backend NAME [--model FILE] [--backend-option NAME=VALUE]...

`--backend` is the name of your entry point in the group ``cllm.backends``, or, before you have one, ``module:callable``, from the folder of
the module: what the entry point would say. Other options:

``--model FILE``
    What your backend is asked to load; best a small model, since it is loaded several times. ``tiny:ARCHITECTURE`` makes a tiny GGUF
    file with random weights (qwen3, qwen35, gemma3 or qwen3moe; needs the package ``gguf``), which is what llama.cpp's backends get
    unless they are told otherwise.
``--kv auto|unified|streams``
    The memory layout to ask for. If your backend has several, run the suite for each.
``--tolerance X``
    By how much logits may differ that should be equal, as a part of their standard deviation; 0.01 if not given. The suite asks for F32
    caches and for no flash attention, where batches of different shape differ least; a row that is not the right one differs by 1.

The suite looks at behaviour only. Where your model's `Capabilities` say that it cannot do a thing, it sees that the model refuses,
leaves its memory as it was, and skips the rest with the reason. Crashes count: a native backend that ends the process fails
the suite. The test's name says what is promised; the docstrings in ``cllm/backend.py`` say it in full.
"""
