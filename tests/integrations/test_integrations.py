"""Adapters, quantisers and exporters of others on our layers, where they are installed; no GPU is needed.

`docs/support.md` lists what is checked, and in which order of adapting and converting.
"""

from tests.integrations.harness import make_module_test

test_transformer_engine = make_module_test("transformer_engine_checks", "transformer_engine")
test_modelopt = make_module_test("modelopt_checks", "modelopt")
test_modelopt_with_transformer_engine = make_module_test("modelopt_te_checks", "modelopt", "transformer_engine")
test_megatron_bridge = make_module_test("bridge_checks", "megatron.bridge", "transformer_engine")
test_mcore_bridge = make_module_test("mcore_bridge_checks", "mcore_bridge", "peft", "transformer_engine")
