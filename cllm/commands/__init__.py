"""What `cllm` does at a terminal beside serving and measuring: one file for each command."""
