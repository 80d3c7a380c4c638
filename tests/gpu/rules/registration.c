/* cuMemHostRegister: exact bytes, what can be registered, what an munmap leaves
 * behind. */
#include "rule.h"

static nrm_CUstream stream;
static nrm_CUdeviceptr on_device;

static nrm_CUresult
type_of(const void *ptr)
{
    unsigned int type;
    return cu.cuPointerGetAttribute(&type, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                    address_of(ptr));
}

static nrm_CUresult
copy_in(const void *ptr, size_t nbytes)
{
    nrm_CUresult result = cu.cuMemcpyHtoDAsync(on_device, ptr, nbytes, stream);
    nrm_CUresult done = cu.cuStreamSynchronize(stream);
    return result != NRM_CUDA_SUCCESS ? result : done;
}

static void
bytes(unsigned char *p)
{
    size_t size = 0;
    nrm_CUdeviceptr first = 0;
    expect("register 5000 bytes that start inside a page",
           cu.cuMemHostRegister(p + 100, 5000, 1), NRM_CUDA_SUCCESS);
    expect("type of a byte inside", type_of(p + 200), NRM_CUDA_SUCCESS);
    expect("type of its last byte", type_of(p + 5099), NRM_CUDA_SUCCESS);
    expect("type of the byte before it", type_of(p + 99), NRM_CUDA_ERROR_INVALID_VALUE);
    expect("type of the byte behind it", type_of(p + 5100),
           NRM_CUDA_ERROR_INVALID_VALUE);
    MUST(cu.cuPointerGetAttribute(&size, NRM_CU_POINTER_ATTRIBUTE_RANGE_SIZE,
                                  address_of(p + 200)));
    MUST(cu.cuPointerGetAttribute(&first, NRM_CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
                                  address_of(p + 200)));
    expect_number("range size", (long long)size, 5000);
    expect_number("range start, from the beginning", (long long)(first - address_of(p)),
                  100);
    expect("copy all of it", copy_in(p + 100, 5000), NRM_CUDA_SUCCESS);
    expect("copy a neighbour on the same page", copy_in(p + 5100, 1000),
           NRM_CUDA_SUCCESS);
    expect("copy that starts before it and runs through it", copy_in(p, 20000),
           NRM_CUDA_SUCCESS);
    expect("copy that starts in it and runs out of it", copy_in(p + 200, 20000),
           NRM_CUDA_ERROR_INVALID_VALUE);
    expect("register a neighbour on the same page",
           cu.cuMemHostRegister(p + 5100, 20000, 1), NRM_CUDA_SUCCESS);
    expect("copy across two neighbouring registrations", copy_in(p + 200, 20000),
           NRM_CUDA_ERROR_INVALID_VALUE);
    expect("register the same bytes again", cu.cuMemHostRegister(p + 100, 5000, 1),
           NRM_CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    expect("register a part again", cu.cuMemHostRegister(p + 200, 10, 1),
           NRM_CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    expect("register what overlaps", cu.cuMemHostRegister(p, 101, 1),
           NRM_CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
    expect("unregister an interior address", cu.cuMemHostUnregister(p + 200),
           NRM_CUDA_ERROR_INVALID_VALUE);
    expect("unregister the neighbour", cu.cuMemHostUnregister(p + 5100),
           NRM_CUDA_SUCCESS);
    expect("unregister the first", cu.cuMemHostUnregister(p + 100), NRM_CUDA_SUCCESS);
    expect("unregister it again", cu.cuMemHostUnregister(p + 100),
           NRM_CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    expect("register one byte", cu.cuMemHostRegister(p, 1, 1), NRM_CUDA_SUCCESS);
    expect("unregister it", cu.cuMemHostUnregister(p), NRM_CUDA_SUCCESS);
    expect("register zero bytes", cu.cuMemHostRegister(p, 0, 1),
           NRM_CUDA_ERROR_INVALID_VALUE);
}

static void
mappings(void)
{
    char path[] = "/var/tmp/nrm-rule-XXXXXX";
    const size_t n = 8 * MIB;
    int file = mkstemp(path);
    int memory = memfd_create("rule", 0);
    if (file < 0 || memory < 0 || ftruncate(file, (off_t)n) != 0 ||
        ftruncate(memory, (off_t)n) != 0) {
        abort();
    }
    unlink(path);
    void *read_only = mmap(NULL, n, PROT_READ, MAP_SHARED, file, 0);
    void *private_read_only = mmap(NULL, n, PROT_READ, MAP_PRIVATE, file, 0);
    void *writable = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    void *shared = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    expect("register a read-only file mapping", cu.cuMemHostRegister(read_only, n, 1),
           NRM_CUDA_ERROR_INVALID_VALUE);
    expect("the same with READ_ONLY", cu.cuMemHostRegister(read_only, n, 9),
           NRM_CUDA_SUCCESS);
    expect("copy from it", copy_in(read_only, n), NRM_CUDA_SUCCESS);
    expect("unregister it", cu.cuMemHostUnregister(read_only), NRM_CUDA_SUCCESS);
    expect("register a private read-only mapping",
           cu.cuMemHostRegister(private_read_only, n, 1), NRM_CUDA_ERROR_INVALID_VALUE);
    expect("the same with READ_ONLY", cu.cuMemHostRegister(private_read_only, n, 9),
           NRM_CUDA_SUCCESS);
    expect("unregister it", cu.cuMemHostUnregister(private_read_only),
           NRM_CUDA_SUCCESS);
    expect("register a writable shared file mapping",
           cu.cuMemHostRegister(writable, n, 1), NRM_CUDA_ERROR_INVALID_VALUE);
    expect("register shared memory", cu.cuMemHostRegister(shared, n, 1),
           NRM_CUDA_SUCCESS);
    expect("unregister it", cu.cuMemHostUnregister(shared), NRM_CUDA_SUCCESS);
}

static void
unmapped(void)
{
    const size_t n = 512 * KIB;
    unsigned char *p = pages(n, 7);
    MUST(cu.cuMemHostRegister(p, n, 1));
    munmap(p, n);
    expect("copy from registered memory after its munmap", copy_in(p, n),
           NRM_CUDA_SUCCESS);
    expect_number("the byte that arrives is the old one", device_byte(on_device), 7);
    expect("unregister it then", cu.cuMemHostUnregister(p), NRM_CUDA_SUCCESS);

    unsigned char *q = pages(n, 3);
    MUST(cu.cuMemHostRegister(q, n, 1));
    unsigned char *moved = mremap(q, n, 2 * n, MREMAP_MAYMOVE);
    expect_yes("registered memory can be moved", moved != MAP_FAILED);
    if (moved != q && moved != MAP_FAILED) {
        expect("type of the new address", type_of(moved), NRM_CUDA_ERROR_INVALID_VALUE);
    }
    MUST(cu.cuMemHostUnregister(q));
}

int
main(int argc, char **argv)
{
    start(argc, argv);
    MUST(cu.cuStreamCreate(&stream, NRM_CU_STREAM_NON_BLOCKING));
    MUST(cu.cuMemAlloc(&on_device, 64 * MIB));
    bytes(pages(MIB, 1));
    mappings();
    unmapped();
    return finish();
}
