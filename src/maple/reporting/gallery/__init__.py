"""The ``gallery/`` folder of a run: thumbnails and 2-D projections, so that a report needs neither images nor model.

Training and evaluation write it while they hold images and outputs (`write_training_gallery`,
`write_evaluation_gallery`); the report, the explanations and the server read it (`read_gallery`).
"""

from maple.reporting.gallery.store import (
    ClusterExemplars,
    Gallery,
    read_gallery,
    remove_components,
    remove_examples,
    save_clusters,
)
from maple.reporting.gallery.write import (
    count_images,
    find_exemplars,
    write_cluster_gallery,
    write_evaluation_gallery,
    write_training_gallery,
)
