"""Files in the format of safetensors, written by its definition."""

import json
import struct

import torch


def safetensors(path, tensors):
    """A file with these tensors."""
    names = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64"}
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, x in tensors.items():
        raw = x.contiguous().view(torch.uint8).numpy().tobytes()
        place = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": names[x.dtype], "shape": list(x.shape), "data_offsets": place}
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path
