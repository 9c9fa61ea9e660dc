-- The runtimes beside rlood's own engine that a worker can start, as JSON: [{runtime, versions, extras, devices, gpus}]. NULL = none.
ALTER TABLE workers ADD COLUMN runtimes TEXT;
-- The number of devices that a job of the runtime trl can have on the worker; 0 = the worker cannot run such jobs.
ALTER TABLE workers ADD COLUMN trl_devices INTEGER NOT NULL DEFAULT 0;
