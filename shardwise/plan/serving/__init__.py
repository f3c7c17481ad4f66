"""What a model costs to serve: prefill and decode by the same kernel curves as training, under the loads people measure.

`engines.py` has the facts about serving programs, `cost.py` the cost of a pass and its memory, `loads.py` how requests come and
wait, `inference.py` the prediction.
"""

from shardwise.plan.serving.inference import serve

__all__ = ["serve"]
