/* Contexts that a program makes beside the primary one: what is theirs, what goes with
 * them, and what is said of them afterwards. */
#include "rule.h"

static nrm_CUcontext other;
static nrm_CUstream stream;
static nrm_CUevent event;
static unsigned char *page_locked;
static nrm_CUdeviceptr on_device;

static nrm_CUcontext
current(void)
{
    nrm_CUcontext found = NULL;
    MUST(cu.cuCtxGetCurrent(&found));
    return found;
}

static void
while_it_lives(void)
{
    nrm_CUcontext of_stream = NULL;
    nrm_CUdevice of_context = -1;
    nrm_CUevent of_primary;
    nrm_CUcontext popped;
    unsigned long long id = 0, id_of_primary = 0;
    expect("cuCtxCreate", cu.cuCtxCreate(&other, 0, device), NRM_CUDA_SUCCESS);
    expect_yes("it is current", current() == other);
    expect_no("it is the primary one", other == context);
    MUST(cu.cuCtxGetDevice(&of_context));
    expect_yes("its device is the same", of_context == device);
    MUST(cu.cuCtxGetId(other, &id));
    MUST(cu.cuCtxGetId(context, &id_of_primary));
    expect_no("its id is that of the primary one", id == id_of_primary);
    MUST(cu.cuStreamCreate(&stream, NRM_CU_STREAM_NON_BLOCKING));
    MUST(cu.cuStreamGetCtx(stream, &of_stream));
    expect_yes("a new stream is in it", of_stream == other);
    MUST(cu.cuEventCreate(&event, NRM_CU_EVENT_DISABLE_TIMING));
    expect("its event on its stream", cu.cuEventRecord(event, stream),
           NRM_CUDA_SUCCESS);
    MUST(cu.cuCtxPushCurrent(context));
    MUST(cu.cuEventCreate(&of_primary, NRM_CU_EVENT_DISABLE_TIMING));
    expect("its event on its stream, with the primary context current",
           cu.cuEventRecord(event, stream), NRM_CUDA_SUCCESS);
    expect("an event of the primary context on its stream",
           cu.cuEventRecord(of_primary, stream), NRM_CUDA_ERROR_INVALID_HANDLE);
    expect("its event for the whole primary context",
           cu.cuCtxRecordEvent(context, event), NRM_CUDA_ERROR_INVALID_HANDLE);
    expect("its event for all of it", cu.cuCtxRecordEvent(other, event),
           NRM_CUDA_SUCCESS);
    expect("its stream waits for an event of the primary context",
           cu.cuStreamWaitEvent(stream, of_primary, 0), NRM_CUDA_SUCCESS);
    MUST(cu.cuEventDestroy(of_primary));
    MUST(cu.cuCtxPopCurrent(&popped));
}

/* What safe reuse has to know: an event on the whole primary context says nothing. */
static void
what_a_record_covers(void)
{
    nrm_CUevent of_primary;
    nrm_CUcontext popped;
    void *word;
    nrm_CUdeviceptr word_on_device;
    MUST(cu.cuMemHostAlloc(&word, 4096, 3));
    memset(word, 0, 4096);
    MUST(cu.cuMemHostGetDevicePointer(&word_on_device, word, 0));
    MUST(cu.cuMemAlloc(&on_device, MIB));
    MUST(cu.cuStreamWaitValue32(stream, word_on_device, 1, 0));
    expect("page-locked memory of the primary context on its stream",
           cu.cuMemcpyHtoDAsync(on_device, page_locked, MIB, stream), NRM_CUDA_SUCCESS);
    MUST(cu.cuEventRecord(event, stream));
    MUST(cu.cuCtxPushCurrent(context));
    MUST(cu.cuEventCreate(&of_primary, NRM_CU_EVENT_DISABLE_TIMING));
    MUST(cu.cuCtxRecordEvent(context, of_primary));
    usleep(20000);
    expect("an event for the whole primary context meanwhile",
           cu.cuEventQuery(of_primary), NRM_CUDA_SUCCESS);
    expect("its own event", cu.cuEventQuery(event), NRM_CUDA_ERROR_NOT_READY);
    MUST(cu.cuEventDestroy(of_primary));
    MUST(cu.cuCtxPopCurrent(&popped));
    *(volatile unsigned *)word = 1;
    expect("its stream", cu.cuStreamSynchronize(stream), NRM_CUDA_SUCCESS);
    MUST(cu.cuMemFree(on_device));
    MUST(cu.cuMemFreeHost(word));
}

/* And what stream order has to: an event of all of it, and of its legacy stream, says
   when its work is done, and streams of the primary context can wait for that. */
static void
what_its_own_events_cover(void)
{
    nrm_CUevent of_all, of_legacy;
    nrm_CUstream of_primary;
    void *word;
    nrm_CUdeviceptr word_on_device, target;
    MUST(cu.cuMemHostAlloc(&word, 4096, 3));
    memset(word, 0, 4096);
    MUST(cu.cuMemHostGetDevicePointer(&word_on_device, word, 0));
    MUST(cu.cuMemAlloc(&target, MIB));
    MUST(cu.cuEventCreate(&of_all, NRM_CU_EVENT_DISABLE_TIMING));
    MUST(cu.cuEventCreate(&of_legacy, NRM_CU_EVENT_DISABLE_TIMING));
    MUST(cu.cuStreamWaitValue32(stream, word_on_device, 1, 0));
    MUST(cu.cuMemsetD8Async(target, 1, MIB, stream));
    MUST(cu.cuStreamWaitValue32(NRM_CU_STREAM_LEGACY, word_on_device, 1, 0));
    MUST(cu.cuMemsetD8Async(target, 2, MIB, NRM_CU_STREAM_LEGACY));
    expect("an event for all of it", cu.cuCtxRecordEvent(other, of_all),
           NRM_CUDA_SUCCESS);
    expect("an event on its legacy stream",
           cu.cuEventRecord(of_legacy, NRM_CU_STREAM_LEGACY), NRM_CUDA_SUCCESS);
    usleep(20000);
    expect("the event for all of it meanwhile", cu.cuEventQuery(of_all),
           NRM_CUDA_ERROR_NOT_READY);
    expect("the event on its legacy stream meanwhile", cu.cuEventQuery(of_legacy),
           NRM_CUDA_ERROR_NOT_READY);
    MUST(cu.cuCtxPushCurrent(context));
    MUST(cu.cuStreamCreate(&of_primary, NRM_CU_STREAM_NON_BLOCKING));
    expect("a stream of the primary context waits for it",
           cu.cuStreamWaitEvent(of_primary, of_all, 0), NRM_CUDA_SUCCESS);
    expect("that stream meanwhile", cu.cuStreamQuery(of_primary),
           NRM_CUDA_ERROR_NOT_READY);
    *(volatile unsigned *)word = 1;
    expect("that stream afterwards", cu.cuStreamSynchronize(of_primary),
           NRM_CUDA_SUCCESS);
    MUST(cu.cuStreamDestroy(of_primary));
    MUST(cu.cuCtxPopCurrent(&(nrm_CUcontext){NULL}));
    expect("the event for all of it afterwards", cu.cuEventQuery(of_all),
           NRM_CUDA_SUCCESS);
    MUST(cu.cuCtxSynchronize());
    MUST(cu.cuEventDestroy(of_all));
    MUST(cu.cuEventDestroy(of_legacy));
    MUST(cu.cuMemFree(target));
    MUST(cu.cuMemFreeHost(word));
}

static nrm_CUresult
destroy(void *arg)
{
    return cu.cuCtxDestroy((nrm_CUcontext)arg);
}

static void
when_it_is_destroyed(void)
{
    unsigned long long id;
    unsigned int type;
    unsigned char *registered = pages(MIB, 1);
    MUST(cu.cuMemHostRegister(registered, MIB, NRM_CU_MEMHOSTREGISTER_PORTABLE));
    expect("cuCtxDestroy", cu.cuCtxDestroy(other), NRM_CUDA_SUCCESS);
    expect_yes("the one before it is current again", current() == context);
    expect("what was registered in it", cu.cuMemHostUnregister(registered),
           NRM_CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
    expect("what was page-locked in the primary one",
           cu.cuPointerGetAttribute(&type, NRM_CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
                                    address_of(page_locked)),
           NRM_CUDA_SUCCESS);
    nrm_CUresult code = cu.cuCtxGetId(other, &id);
    expect_yes("its id is refused as that of no context",
               code == NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED ||
                   code == NRM_CUDA_ERROR_INVALID_CONTEXT);
}

static void
when_another_thread_destroys_it(void)
{
    unsigned long long id;
    size_t available, total;
    MUST(cu.cuCtxCreate(&other, 0, device));
    expect("cuCtxDestroy in another thread", in_bare_thread(destroy, other),
           NRM_CUDA_SUCCESS);
    expect_yes("it stays current", current() == other);
    expect("cuMemGetInfo in it", cu.cuMemGetInfo(&available, &total),
           NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED);
    nrm_CUresult code = cu.cuCtxGetId(other, &id);
    expect_yes("its id is refused as that of no context",
               code == NRM_CUDA_ERROR_CONTEXT_IS_DESTROYED ||
                   code == NRM_CUDA_ERROR_INVALID_CONTEXT);
    expect("the primary one in its place", cu.cuCtxSetCurrent(context),
           NRM_CUDA_SUCCESS);
}

int
main(int argc, char **argv)
{
    start(argc, argv);
    MUST(cu.cuMemHostAlloc((void **)&page_locked, MIB, 1));
    while_it_lives();
    what_a_record_covers();
    what_its_own_events_cover();
    when_it_is_destroyed();
    when_another_thread_destroys_it();
    MUST(cu.cuMemFreeHost(page_locked));
    return finish();
}
