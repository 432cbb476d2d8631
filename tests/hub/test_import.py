"""Importing the package's Hub part is cheap."""


def test_importing_hub_loads_neither_the_client_library_nor_distributed(run_elsewhere):
    code = """
        import sys
        import gpuclassify.hub
        print(sorted({"huggingface_hub", "distributed", "torch"} & set(sys.modules)))
    """
    assert run_elsewhere(code) == ["[]"]
