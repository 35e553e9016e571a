"""What decoder layers of several systems share.

    products.py    products whose weights may add up their gradients in FP32 as they are made
    recomputing.py what the backward makes again instead of keeping it
"""
