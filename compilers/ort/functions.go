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

var (
	fnGetApi           = declare(apiBase, 0, "GetApi", 0)
	fnGetVersionString = declare(apiBase, 1, "GetVersionString", 0)

	fnCreateStatus                   = declare(apiTable, 0, "CreateStatus", 0)
	fnGetErrorCode                   = declare(apiTable, 1, "GetErrorCode", 0)
	fnGetErrorMessage                = declare(apiTable, 2, "GetErrorMessage", 0)
	fnCreateEnvWithCustomLogger      = declare(apiTable, 4, "CreateEnvWithCustomLogger", 0)
	fnDisableTelemetryEvents         = declare(apiTable, 6, "DisableTelemetryEvents", 0)
	fnCreateSession                  = declare(apiTable, 7, "CreateSession", 0)
	fnCreateSessionFromArray         = declare(apiTable, 8, "CreateSessionFromArray", 0)
	fnRun                            = declare(apiTable, 9, "Run", 0)
	fnCreateSessionOptions           = declare(apiTable, 10, "CreateSessionOptions", 0)
	fnSetSessionGraphOptLevel        = declare(apiTable, 23, "SetSessionGraphOptimizationLevel", 0)
	fnSessionGetInputCount           = declare(apiTable, 30, "SessionGetInputCount", 0)
	fnSessionGetOutputCount          = declare(apiTable, 31, "SessionGetOutputCount", 0)
	fnSessionGetInputTypeInfo        = declare(apiTable, 33, "SessionGetInputTypeInfo", 0)
	fnSessionGetInputName            = declare(apiTable, 36, "SessionGetInputName", 0)
	fnSessionGetOutputName           = declare(apiTable, 37, "SessionGetOutputName", 0)
	fnCreateTensorWithData           = declare(apiTable, 49, "CreateTensorWithDataAsOrtValue", 0)
	fnIsTensor                       = declare(apiTable, 50, "IsTensor", 0)
	fnGetTensorMutableData           = declare(apiTable, 51, "GetTensorMutableData", 0)
	fnCastTypeInfoToTensorInfo       = declare(apiTable, 55, "CastTypeInfoToTensorInfo", 0)
	fnGetTensorElementType           = declare(apiTable, 60, "GetTensorElementType", 0)
	fnGetDimensionsCount             = declare(apiTable, 61, "GetDimensionsCount", 0)
	fnGetDimensions                  = declare(apiTable, 62, "GetDimensions", 0)
	fnGetTensorTypeAndShape          = declare(apiTable, 65, "GetTensorTypeAndShape", 0)
	fnCreateCpuMemoryInfo            = declare(apiTable, 69, "CreateCpuMemoryInfo", 0)
	fnAllocatorFree                  = declare(apiTable, 76, "AllocatorFree", 0)
	fnGetAllocatorWithDefaultOptions = declare(apiTable, 78, "GetAllocatorWithDefaultOptions", 0)
	fnAddFreeDimensionOverride       = declare(apiTable, 79, "AddFreeDimensionOverride", 0)
	fnReleaseEnv                     = declare(apiTable, 92, "ReleaseEnv", 0)
	fnReleaseStatus                  = declare(apiTable, 93, "ReleaseStatus", 0)
	fnReleaseMemoryInfo              = declare(apiTable, 94, "ReleaseMemoryInfo", 0)
	fnReleaseSession                 = declare(apiTable, 95, "ReleaseSession", 0)
	fnReleaseValue                   = declare(apiTable, 96, "ReleaseValue", 0)
	fnReleaseTypeInfo                = declare(apiTable, 98, "ReleaseTypeInfo", 0)
	fnReleaseTensorTypeAndShapeInfo  = declare(apiTable, 99, "ReleaseTensorTypeAndShapeInfo", 0)
	fnReleaseSessionOptions          = declare(apiTable, 100, "ReleaseSessionOptions", 0)
	fnAddFreeDimensionOverrideByName = declare(apiTable, 124, "AddFreeDimensionOverrideByName", 0)
	fnAddSessionConfigEntry          = declare(apiTable, 130, "AddSessionConfigEntry", 0)
	fnAddExternalFilesInMemory       = declare(apiTable, 279,
		"AddExternalInitializersFromFilesInMemory", 18)
	fnGetBuildInfoString           = declare(apiTable, 254, "GetBuildInfoString", 15)
	fnGetCompileApi                = declare(apiTable, 294, "GetCompileApi", 22)
	fnGetKeyValuePairs             = declare(apiTable, 298, "GetKeyValuePairs", 22)
	fnRegisterExecutionProviderLib = declare(apiTable, 301,
		"RegisterExecutionProviderLibrary", 22)
	fnUnregisterExecutionProvider = declare(apiTable, 302,
		"UnregisterExecutionProviderLibrary", 22)
	fnGetEpDevices              = declare(apiTable, 303, "GetEpDevices", 22)
	fnAppendExecutionProviderV2 = declare(apiTable, 304,
		"SessionOptionsAppendExecutionProvider_V2", 22)
	fnHardwareDeviceType     = declare(apiTable, 307, "HardwareDevice_Type", 22)
	fnHardwareDeviceVendorID = declare(apiTable, 308, "HardwareDevice_VendorId", 22)
	fnHardwareDeviceVendor   = declare(apiTable, 309, "HardwareDevice_Vendor", 22)
	fnHardwareDeviceDeviceID = declare(apiTable, 310, "HardwareDevice_DeviceId", 22)
	fnHardwareDeviceMetadata = declare(apiTable, 311, "HardwareDevice_Metadata", 22)
	fnEpDeviceEpName         = declare(apiTable, 312, "EpDevice_EpName", 22)
	fnEpDeviceEpVendor       = declare(apiTable, 313, "EpDevice_EpVendor", 22)
	fnEpDeviceEpMetadata     = declare(apiTable, 314, "EpDevice_EpMetadata", 22)
	fnEpDeviceDevice         = declare(apiTable, 316, "EpDevice_Device", 22)
	fnGetTensorSizeInBytes   = declare(apiTable, 318, "GetTensorSizeInBytes", 23)
	fnExternalInfoFilePath   = declare(apiTable, 370,
		"ExternalInitializerInfo_GetFilePath", 23)
	fnExternalInfoFileOffset = declare(apiTable, 371,
		"ExternalInitializerInfo_GetFileOffset", 23)
	fnExternalInfoByteSize = declare(apiTable, 372,
		"ExternalInitializerInfo_GetByteSize", 23)
	fnGetModelCompatibilityForDevices = declare(apiTable, 388,
		"GetModelCompatibilityForEpDevices", 23)
	fnCreateExternalInfo = declare(apiTable, 389, "CreateExternalInitializerInfo", 23)

	fnReleaseCompilationOptions = declare(compileAPI, 0, "ReleaseModelCompilationOptions", 22)
	fnCreateCompilationOptions  = declare(compileAPI, 1,
		"CreateModelCompilationOptionsFromSessionOptions", 22)
	fnSetInputModelPath = declare(compileAPI, 2,
		"ModelCompilationOptions_SetInputModelPath", 22)
	fnSetInputModelFromBuffer = declare(compileAPI, 3,
		"ModelCompilationOptions_SetInputModelFromBuffer", 22)
	fnSetOutputModelPath = declare(compileAPI, 4,
		"ModelCompilationOptions_SetOutputModelPath", 22)
	fnSetOutputInitializersFile = declare(compileAPI, 5,
		"ModelCompilationOptions_SetOutputModelExternalInitializersFile", 22)
	fnSetOutputModelBuffer = declare(compileAPI, 6,
		"ModelCompilationOptions_SetOutputModelBuffer", 22)
	fnSetEpContextEmbedMode = declare(compileAPI, 7,
		"ModelCompilationOptions_SetEpContextEmbedMode", 22)
	fnCompileModel         = declare(compileAPI, 8, "CompileModel", 22)
	fnSetCompileFlags      = declare(compileAPI, 9, "ModelCompilationOptions_SetFlags", 23)
	fnSetBinaryInformation = declare(compileAPI, 10,
		"ModelCompilationOptions_SetEpContextBinaryInformation", 23)
	fnSetCompileGraphOptLevel = declare(compileAPI, 11,
		"ModelCompilationOptions_SetGraphOptimizationLevel", 23)
	fnSetOutputWriteFunc = declare(compileAPI, 12,
		"ModelCompilationOptions_SetOutputModelWriteFunc", 23)
	fnSetInitializerLocation = declare(compileAPI, 13,
		"ModelCompilationOptions_SetOutputModelGetInitializerLocationFunc", 23)
)
