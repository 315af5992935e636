"""AdaServe. In a clone some of its packages lie beside this folder: scheduler/, patches/ and loadgen/."""

import os

_HERE = os.path.dirname(__file__)
if not os.path.exists(os.path.join(_HERE, "scheduler")):
    # Run there, Python finds this folder before an installed AdaServe.
    __path__.append(os.path.dirname(_HERE))
