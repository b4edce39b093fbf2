"""The processes of one training: how they start, share work, exchange arrays and end."""

from maple.training.processes.agreement import naming_lost_processes, together
from maple.training.processes.exchange import (
    agree_on_buffers,
    agree_on_state,
    embed_shared,
    gather_rows,
    mean_over_ranks,
    share_of,
    share_work,
    sum_over_ranks,
)
from maple.training.processes.launch import check_processes, count_processes, make_fabric
