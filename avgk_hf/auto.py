"""Makes the Auto classes of transformers know this package's model; importing it is enough."""

from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, TimmWrapperImageProcessor

from .configuration import AvgKConfig
from .modeling import AvgKForImageClassification

AutoConfig.register("avgk", AvgKConfig, exist_ok=True)
AutoModelForImageClassification.register(AvgKConfig, AvgKForImageClassification, exist_ok=True)
AutoImageProcessor.register(AvgKConfig, image_processor_classes={"pil": TimmWrapperImageProcessor}, exist_ok=True)
