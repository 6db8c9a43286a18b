"""``torch.compile`` on the null device.

Dynamo, AOTAutograd and inductor run as they are: graphs, what is kept for the backward pass, the
order of kernels and the reuse of buffers are theirs. What inductor generates is launched as one op
for each kernel over the tensors it was given, with the bytes that it reads and writes; nothing is
compiled for a GPU. A compiled function runs its kernels like an eager one its operators.
"""
