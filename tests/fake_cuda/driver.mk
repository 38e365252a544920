# Called by build.sh with HERE, ROOT, OUT and CUDA set.
MAKEFLAGS += --no-builtin-rules
.DELETE_ON_ERROR:

CXX := g++
COMMON := -std=c++17 -O2 -g1 -march=x86-64-v3 -fPIC -Wall -I $(HERE) -isystem $(CUDA)/include -isystem $(CUDA)/include/cccl
# Unlike a GPU's, the host's compiler would make something of types that alias, and of traps.
KERNEL := $(COMMON) -x c++ -fvisibility=hidden -fno-strict-aliasing -fwrapv -Wno-unknown-pragmas -Wno-sign-compare -Wno-maybe-uninitialized \
    -DNXRT_EMULATE -I $(ROOT)/kernels/cuda

PARTS := $(notdir $(wildcard $(HERE)/*.cpp))
CU := $(sort $(shell find $(ROOT)/kernels -name '*.cu'))
# A kernel's library is named after its folder under kernels/ops.
stem = $(subst /,_,$(patsubst ops/%,%,$(patsubst %/cuda,%,$(patsubst $(ROOT)/kernels/%.cu,%,$(1)))))
OBJECTS := $(PARTS:%.cpp=$(OUT)/driver/%.o) $(OUT)/kernels/selftest.o

$(OUT)/libcuda.so: $(OUT)/libcuda.so.1
	ln -sf libcuda.so.1 $@

define kernel_rules
OBJECTS += $(OUT)/kernels/$(call stem,$(1)).o
$(OUT)/kernels/$(call stem,$(1)).o: $(1)
endef
$(foreach cu,$(CU),$(eval $(call kernel_rules,$(cu))))
$(OUT)/kernels/selftest.o: $(HERE)/selftest.cu

$(OUT)/libcuda.so.1: $(OBJECTS) $(HERE)/driver.mk $(HERE)/exports.map
	echo 'linking $(notdir $@)'
	$(CXX) -shared -Wl,-soname,libcuda.so.1 -Wl,-z,defs -Wl,--version-script=$(HERE)/exports.map -o $@.new $(OBJECTS) -ldl -lpthread
	mv $@.new $@

$(OUT)/driver/%.o: $(HERE)/%.cpp $(HERE)/driver.mk | $(OUT)/driver
	echo 'compiling $(notdir $<)'
	$(CXX) $(COMMON) -fno-plt -fno-semantic-interposition -MMD -MP -c $< -o $@

# Files are modules of their own on a GPU: nothing but the kernels' descriptions may be shared between them.
$(OUT)/kernels/%.o: $(HERE)/driver.mk | $(OUT)/kernels
	echo 'compiling $(patsubst $(ROOT)/%,%,$(filter %.cu,$^))'
	$(CXX) $(KERNEL) -DNXRT_EMULATE_STEM=$* -MMD -MP -MF $(@:.o=.d) -MT $@ -c $(filter %.cu,$^) -o $@.raw
	ld -r --force-group-allocation $@.raw -o $@.linked
	objcopy --localize-hidden $@.linked $@
	rm -f $@.raw $@.linked

$(OUT)/driver $(OUT)/kernels:
	mkdir -p $@

-include $(OUT)/driver/*.d $(OUT)/kernels/*.d
