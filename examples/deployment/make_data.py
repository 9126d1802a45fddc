"""Write the data of a few sites, one file each: ``python make_data.py FOLDER NUM_SITES``.

Scikit-learn's digits are dealt out in turn. The last site calls a three an eight and the reverse.
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

folder, num_sites = Path(sys.argv[1]), int(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
pixels, digits = load_digits(return_X_y=True)
for site in range(num_sites):
    inputs, labels = (pixels[site::num_sites] / 16).astype(np.float32), digits[site::num_sites]
    if site == num_sites - 1:
        labels = np.select([labels == 3, labels == 8], [8, 3], labels)
    np.savez(folder / f"site-{site}.npz", inputs=inputs, labels=labels)
