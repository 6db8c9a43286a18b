"""``torch.compile`` on the null device.

Dynamo, AOTAutograd and inductor run unchanged. They decide on the graphs, the tensors saved for the
backward pass, the order of kernels and the reuse of buffers. Each kernel that inductor generates is
launched as one op over the tensors it was given, with the number of bytes that it reads and writes;
nothing is compiled for a GPU. A compiled function launches its kernels as an eager function
launches its operators.
"""
