# Read after driver.mk: what onnxruntime-genai's CUDA library links, and the kernels that it brings along.
CUDART := $(HERE)/cudart
LIBRARIES := $(OUT)/cudart/libcudart.so.13
# It links these too, and uses nothing of them.
UNUSED := $(addprefix $(OUT)/cudart/,libcublasLt.so.13 libcublas.so.13 libcurand.so.10 libcufft.so.12)
OBJECTS += $(OUT)/kernels/genai.o

all: $(OUT)/libcuda.so $(LIBRARIES) $(UNUSED)

$(OUT)/libcuda.so.1: $(OUT)/kernels/genai.o
$(OUT)/kernels/genai.o: $(CUDART)/genai.cu

$(OUT)/cudart/libcudart.so.13: $(CUDART)/cudart.cpp $(CUDART)/kernels.h $(CUDART)/cudart.map $(OUT)/libcuda.so.1 | $(OUT)/cudart
	echo 'compiling cudart.cpp'
	$(CXX) $(COMMON) -shared -Wl,-soname,$(notdir $@) -Wl,--version-script=$(CUDART)/cudart.map -o $@ $< $(OUT)/libcuda.so.1

$(UNUSED): | $(OUT)/cudart
	$(CXX) -shared -x c++ /dev/null -Wl,-soname,$(notdir $@) -o $@

$(OUT)/cudart:
	mkdir -p $@

-include $(OUT)/kernels/genai.d
