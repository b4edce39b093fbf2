"""Networks: architectures, the backbone around them, and opening networks from other libraries."""
