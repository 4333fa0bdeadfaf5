"""Packaging of ssl_influence. Exact tested versions are in third_party/constraints.txt."""

import pathlib

import setuptools

README = pathlib.Path(__file__).resolve().parent / "README.md"

REQUIRED = [
    "tensorflow>=2.20,<2.21",
    "tf_keras>=2.20,<2.21",
    "tensorflow-datasets>=4.9.7,<5",
    "etils[epath]>=1.9.1,<2",
    # TFDS imports it to prepare a dataset, without declaring it.
    "importlib_resources>=5",
    "absl-py>=1.4,<3",
    "tensorboard>=2.20,<2.21",
    "tqdm>=4.66,<5",
    "pillow>=10.1,<14",
    "scipy>=1.11,<2",
    # Python 3.10 is out of support in the newer releases of these three.
    "numpy>=1.26,<2.3; python_version < '3.11'",
    "numpy>=1.26,<3; python_version >= '3.11'",
    "scikit-learn>=1.5,<1.8; python_version < '3.11'",
    "scikit-learn>=1.5.2,<2; python_version >= '3.11'",
    "matplotlib>=3.8,<3.11; python_version < '3.11'",
    "matplotlib>=3.9,<4; python_version >= '3.11'",
]

EXTRAS = {
    "text": [
        "tensorflow-text>=2.20,<2.21",
        "tf-models-official>=2.20,<2.21",
        "safetensors>=0.4,<1",
    ],
    "gpu": ["tensorflow[and-cuda]>=2.20,<2.21; platform_system == 'Linux'"],
    # tensorflow-tpu holds the module `tensorflow` too, and the last one installed wins. After this
    # extra: pip uninstall -y tensorflow && pip install --force-reinstall --no-deps tensorflow-tpu
    "tpu": ["tensorflow-tpu>=2.20,<2.21; platform_system == 'Linux'"],
    "test": [
        "pytest>=8",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "ruff>=0.12",
        # Tests of the HTML report; they also need chromium and chromedriver, and skip without.
        "selenium>=4.20,<5",
    ],
}

setuptools.setup(
    name="ssl_influence",
    version="0.1.0",
    description="Per-example weights of unlabeled data, learned by influence functions",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=setuptools.find_packages(include=["ssl_influence", "ssl_influence.*"]),
    package_data={"ssl_influence.reporting.weights_report": ["*.css", "*.js"]},
    python_requires=">=3.10,<3.14",
    install_requires=REQUIRED,
    extras_require=EXTRAS,
)
