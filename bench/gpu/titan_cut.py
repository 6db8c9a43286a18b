"""8B of torchtitan 0.2.2 with 8 of its 32 layers, for --experimental.custom_import."""

from dataclasses import replace

from torchtitan.models.llama3 import llama3_args

llama3_args["8B_8_layers"] = replace(llama3_args["8B"], n_layers=8)
