//! One child per device: spawn self, restart with back-off, pass on shutdown.
