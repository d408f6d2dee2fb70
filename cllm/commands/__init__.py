"""What `cllm` does at a terminal beside serving and measuring: a file for each command, and one for those of the hub."""
