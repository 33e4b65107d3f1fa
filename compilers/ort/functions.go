package ort

type table string

const (
	apiBase    table = "OrtApiBase"
	apiTable   table = "OrtApi"
	compileAPI table = "OrtCompileApi"
)

type function struct {
	table table
	field string // the name in the public header
	slot  int    // position, in pointers
	// the ORT version 1.minor that it came with; 0: before the oldest that is supported
	minor int
}

var declared []function // lists all functions, for the test that compares them with the header

func declare(t table, slot int, field string, minor int) function {
	f := function{t, field, slot, minor}
	declared = append(declared, f)
	return f
}

// api declares a function of OrtApi.
func api(slot int, field string, minor int) function {
	return declare(apiTable, slot, field, minor)
}

// option declares a setter of OrtModelCompilationOptions.
func option(slot int, field string, minor int) function {
	return declare(compileAPI, slot, "ModelCompilationOptions_"+field, minor)
}

var (
	fnGetApi           = declare(apiBase, 0, "GetApi", 0)
	fnGetVersionString = declare(apiBase, 1, "GetVersionString", 0)

	fnCreateStatus                    = api(0, "CreateStatus", 0)
	fnGetErrorCode                    = api(1, "GetErrorCode", 0)
	fnGetErrorMessage                 = api(2, "GetErrorMessage", 0)
	fnCreateEnvWithCustomLogger       = api(4, "CreateEnvWithCustomLogger", 0)
	fnDisableTelemetryEvents          = api(6, "DisableTelemetryEvents", 0)
	fnCreateSession                   = api(7, "CreateSession", 0)
	fnCreateSessionFromArray          = api(8, "CreateSessionFromArray", 0)
	fnRun                             = api(9, "Run", 0)
	fnCreateSessionOptions            = api(10, "CreateSessionOptions", 0)
	fnSetSessionGraphOptLevel         = api(23, "SetSessionGraphOptimizationLevel", 0)
	fnSessionGetInputCount            = api(30, "SessionGetInputCount", 0)
	fnSessionGetOutputCount           = api(31, "SessionGetOutputCount", 0)
	fnSessionGetInputTypeInfo         = api(33, "SessionGetInputTypeInfo", 0)
	fnSessionGetInputName             = api(36, "SessionGetInputName", 0)
	fnSessionGetOutputName            = api(37, "SessionGetOutputName", 0)
	fnCreateTensorWithData            = api(49, "CreateTensorWithDataAsOrtValue", 0)
	fnIsTensor                        = api(50, "IsTensor", 0)
	fnGetTensorMutableData            = api(51, "GetTensorMutableData", 0)
	fnCastTypeInfoToTensorInfo        = api(55, "CastTypeInfoToTensorInfo", 0)
	fnGetTensorElementType            = api(60, "GetTensorElementType", 0)
	fnGetDimensionsCount              = api(61, "GetDimensionsCount", 0)
	fnGetDimensions                   = api(62, "GetDimensions", 0)
	fnGetTensorTypeAndShape           = api(65, "GetTensorTypeAndShape", 0)
	fnCreateCpuMemoryInfo             = api(69, "CreateCpuMemoryInfo", 0)
	fnAllocatorFree                   = api(76, "AllocatorFree", 0)
	fnGetAllocatorWithDefaultOptions  = api(78, "GetAllocatorWithDefaultOptions", 0)
	fnAddFreeDimensionOverride        = api(79, "AddFreeDimensionOverride", 0)
	fnReleaseEnv                      = api(92, "ReleaseEnv", 0)
	fnReleaseStatus                   = api(93, "ReleaseStatus", 0)
	fnReleaseMemoryInfo               = api(94, "ReleaseMemoryInfo", 0)
	fnReleaseSession                  = api(95, "ReleaseSession", 0)
	fnReleaseValue                    = api(96, "ReleaseValue", 0)
	fnReleaseTypeInfo                 = api(98, "ReleaseTypeInfo", 0)
	fnReleaseTensorTypeAndShapeInfo   = api(99, "ReleaseTensorTypeAndShapeInfo", 0)
	fnReleaseSessionOptions           = api(100, "ReleaseSessionOptions", 0)
	fnAddFreeDimensionOverrideByName  = api(124, "AddFreeDimensionOverrideByName", 0)
	fnAddSessionConfigEntry           = api(130, "AddSessionConfigEntry", 0)
	fnAddExternalFilesInMemory        = api(279, "AddExternalInitializersFromFilesInMemory", 18)
	fnGetBuildInfoString              = api(254, "GetBuildInfoString", 15)
	fnGetCompileApi                   = api(294, "GetCompileApi", 22)
	fnGetKeyValuePairs                = api(298, "GetKeyValuePairs", 22)
	fnRegisterExecutionProviderLib    = api(301, "RegisterExecutionProviderLibrary", 22)
	fnUnregisterExecutionProvider     = api(302, "UnregisterExecutionProviderLibrary", 22)
	fnGetEpDevices                    = api(303, "GetEpDevices", 22)
	fnAppendExecutionProviderV2       = api(304, "SessionOptionsAppendExecutionProvider_V2", 22)
	fnHardwareDeviceType              = api(307, "HardwareDevice_Type", 22)
	fnHardwareDeviceVendorID          = api(308, "HardwareDevice_VendorId", 22)
	fnHardwareDeviceVendor            = api(309, "HardwareDevice_Vendor", 22)
	fnHardwareDeviceDeviceID          = api(310, "HardwareDevice_DeviceId", 22)
	fnHardwareDeviceMetadata          = api(311, "HardwareDevice_Metadata", 22)
	fnEpDeviceEpName                  = api(312, "EpDevice_EpName", 22)
	fnEpDeviceEpVendor                = api(313, "EpDevice_EpVendor", 22)
	fnEpDeviceEpMetadata              = api(314, "EpDevice_EpMetadata", 22)
	fnEpDeviceDevice                  = api(316, "EpDevice_Device", 22)
	fnGetTensorSizeInBytes            = api(318, "GetTensorSizeInBytes", 23)
	fnExternalInfoFilePath            = api(370, "ExternalInitializerInfo_GetFilePath", 23)
	fnExternalInfoFileOffset          = api(371, "ExternalInitializerInfo_GetFileOffset", 23)
	fnExternalInfoByteSize            = api(372, "ExternalInitializerInfo_GetByteSize", 23)
	fnGetModelCompatibilityForDevices = api(388, "GetModelCompatibilityForEpDevices", 23)
	fnCreateExternalInfo              = api(389, "CreateExternalInitializerInfo", 23)

	fnReleaseCompilationOptions = declare(compileAPI, 0, "ReleaseModelCompilationOptions", 22)
	fnCreateCompilationOptions  = declare(compileAPI, 1,
		"CreateModelCompilationOptionsFromSessionOptions", 22)
	fnSetInputModelPath         = option(2, "SetInputModelPath", 22)
	fnSetInputModelFromBuffer   = option(3, "SetInputModelFromBuffer", 22)
	fnSetOutputModelPath        = option(4, "SetOutputModelPath", 22)
	fnSetOutputInitializersFile = option(5, "SetOutputModelExternalInitializersFile", 22)
	fnSetOutputModelBuffer      = option(6, "SetOutputModelBuffer", 22)
	fnSetEpContextEmbedMode     = option(7, "SetEpContextEmbedMode", 22)
	fnCompileModel              = declare(compileAPI, 8, "CompileModel", 22)
	fnSetCompileFlags           = option(9, "SetFlags", 23)
	fnSetBinaryInformation      = option(10, "SetEpContextBinaryInformation", 23)
	fnSetCompileGraphOptLevel   = option(11, "SetGraphOptimizationLevel", 23)
	fnSetOutputWriteFunc        = option(12, "SetOutputModelWriteFunc", 23)
	fnSetInitializerLocation    = option(13, "SetOutputModelGetInitializerLocationFunc", 23)
)
